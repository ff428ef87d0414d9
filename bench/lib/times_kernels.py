"""Kernels of bench/fit_times.py: fitted to their even rows, and judged by the skewed ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isoload.analysis.measuring import fit_kernel
from isoload.times import ExpertTime, LayerTime
from lib import times_tables as tables
from lib.times_loads import busiest, even_loads, even_rows, rank_rows, seeded
from lib.times_tables import Group, Row

LEAST_ROWS, WORST_FIT, WORST_MEDIAN, NOISE = 20, 0.12, 0.15, 0.03
# Copies of a slot are rounded up to so many: as DeepGEMM's contiguous and masked kernels do; elsewhere 64, or 16 where
# that does not fit even rows. Those of the fused kernel are multiples of any, so they do not tell.
TILES = {"prefill": (128,), "decode": (64,), "trtllm_deepgemm": (128,), "moe_perf": (64, 16), "fused": (1,)}
LARGE = 1024  # tokens from which moe_perf is judged
CONSTANTS = ("a_us", "b_us", "c_us", "rho_us", "p")


@dataclass
class Kernel:
    """is_: what it is, its constants and the errors of its fit; `left_out` says why it is not shipped.

    held_out: of every judged row the relative error, and those of two rules of thumb (imbalance costs nothing; time
    goes with the busiest over the mean; nan where the even row is missing).
    beyond: how many of them have more copies than any even row.
    ratios: (predicted, measured) ratios of two distributions' times on the same ranks and tokens.
    """

    is_: Row
    held_out: list[tuple[float, float, float]] = field(default_factory=list)
    beyond: int = 0
    ratios: list[tuple[float, float]] = field(default_factory=list)

    def close(self) -> Kernel:
        if self.held_out:
            self.is_["held_out_error"] = short(np.median(np.abs([error for error, *_ in self.held_out])))
            if self.is_["held_out_error"] > WORST_MEDIAN:
                self.is_["left_out"] = f"held-out median: {self.is_['held_out_error']:.2f}"
        return self


def short(value: float) -> float:
    return float(f"{value:.4g}")


def shape(row: Row) -> tuple[int, int, int, int]:
    """tokens, experts, top-k, ranks: what loads are made from."""
    return row["num_tokens"], row["num_experts"], row["topk"], row["moe_ep_size"]


def exponent(row: Row) -> float:
    return float(row["distribution"].split("_")[-1])


def us(row: Row) -> float:
    return 1e3 * float(row["latency"])


def even_part(row: Row) -> NDArray[np.int64]:
    """[E/R] copies of rank 0."""
    tokens, experts, top_k, ranks = shape(row)
    return even_loads(tokens, experts, top_k)[: experts // ranks]


def usable(group: Group, kind: str) -> list[Row]:
    """Even rows with a copy of every expert or more; in prefill those that padding would not change."""
    tile = TILES["prefill"][0] if kind == "prefill" else 1

    def counts(row: Row) -> bool:
        copies = row["num_tokens"] * row["topk"] // row["num_experts"]
        return copies > 0 and copies % tile == 0

    return list(filter(counts, group.find(even=True)))


def fitted(group: Group, kind: str) -> Row:
    """What a group is, its constants and errors; `left_out` says why it has none."""
    tiles = TILES.get(group.is_["kernel"], TILES[kind])
    even = usable(group, kind)
    several = sum(row["moe_ep_size"] > 1 for row in even)
    found = group.is_ | {"kind": kind, "even_rows": len(even)}
    if several < LEAST_ROWS:
        return found | {"left_out": f"{several} even rows over several ranks"}
    if (slower := even_is_slower(group)) is not None:
        return found | {"left_out": f"even rows take longer than skewed ones: {slower:.2f}"}
    rows = [even_rows(*shape(row)) if kind == "fused" else row["num_tokens"] for row in even]
    for tile in tiles:
        if found.get("fit_error", 1.0) > WORST_FIT:
            found |= fit(even, np.array(rows, np.float64), kind, tile)
    if found["fit_error"] > WORST_FIT:
        return found | {"left_out": f"mean error of the fit: {found['fit_error']:.2f}"}
    return found


def fit(even: list[Row], rows: NDArray[np.float64], kind: str, tile: int) -> Row:
    """Constants and their error, the range of copies, and as an example a row: slots, copies of each, rows, us."""
    loads, times = [even_part(row) for row in even], np.array([*map(us, even)])
    # Even rows of the fused layer differ by group, not by accident, so none is a stray one.
    soft = {"soft": 1.0} if kind == "fused" else {}
    constants, errors = fit_kernel(loads, rows, times, tile, kind != "decode", **soft)
    found: Row = {name: short(value) for name, value in zip(CONSTANTS, constants, strict=True)}
    copies = [int(each.sum()) for each in loads]
    found |= {"tile": tile, "copies_from": min(copies), "copies_to": max(copies)}
    # One rank alone takes other paths and tunings, so its rows, which fits weigh as any, are no examples.
    alike = [i for i, row in enumerate(even) if np.ptp(loads[i]) == 0 and row["moe_ep_size"] > 1]
    chosen = max(alike, key=lambda i: (copies[i], -len(loads[i])))
    example = [len(loads[chosen]), int(loads[chosen][0]), round(rows[chosen]), short(times[chosen])]
    return found | {"fit_error": short(np.abs(errors).mean()), "example": example}


def even_is_slower(group: Group) -> float | None:
    """Median of skewed over even times of large batches on 8 ranks or more where it is less than 1 beyond noise."""
    even = {shape(row): us(row) for row in group.find(even=True)}
    ratios = [
        us(row) / even[shape(row)]
        for row in group.find(even=False)
        if row["num_tokens"] >= LARGE and row["moe_ep_size"] >= 8 and shape(row) in even
    ]
    median = float(np.median(ratios)) if ratios else 1.0
    return median if median < 1 - NOISE else None


def timed(found: Row) -> ExpertTime:
    names = (
        "gpu",
        "kernel",
        "dtype",
        "hidden",
        "intermediate",
        *CONSTANTS,
        "tile",
        "copies_from",
        "copies_to",
    )
    return ExpertTime(**{name: found[name] for name in names})


def judge(kernel: Kernel, group: Group) -> None:
    """Predicts the skewed rows from draws of their loads."""
    time = timed(kernel.is_)
    even = {shape(row): us(row) for row in usable(group, kernel.is_["kind"])}
    for row in group.find(even=False):
        tokens, experts, top_k, ranks = shape(row)
        counts = {"moe_perf": tokens >= LARGE and ranks > 1, "decode": tokens * top_k > experts}
        if counts.get(kernel.is_["kind"], True):
            loads = busiest(tokens, experts, top_k, ranks, exponent(row))
            flat = even.get(shape(row), np.nan) / us(row)
            excess = loads.sum(-1).mean() * ranks / (tokens * top_k)
            error = 1e6 * time.seconds(loads, np.full(len(loads), tokens)).mean() / us(row) - 1
            kernel.held_out.append((float(error), flat - 1, flat * float(excess) - 1))
            kernel.beyond += bool(time.extrapolated(loads).mean() > 0.5)


def judge_fused(kernel: Kernel, group: Group) -> None:
    """The same for whole layers: the slowest rank of the one seeded draw."""
    layer, even = (
        LayerTime(None, timed(kernel.is_), None),
        {shape(row): us(row) for row in group.find(even=True)},
    )
    times: dict[tuple[int, int, int, int], list[tuple[float, float]]] = {}
    for row in group.find(even=False):
        if "sampled" not in row["distribution"]:
            tokens, experts, top_k, ranks = shape(row)
            loads = seeded(tokens, experts, top_k, exponent(row)).reshape(ranks, -1)
            predicted = 1e6 * float(layer.seconds(loads, rank_rows(loads.flatten(), tokens, ranks))[1])
            flat, excess = even[shape(row)] / us(row), loads.sum(-1).max() * ranks / (tokens * top_k)
            kernel.held_out.append((predicted / us(row) - 1, flat - 1, flat * float(excess) - 1))
            times.setdefault(shape(row), []).append((predicted, us(row)))
    for (one, measured), (other, other_measured) in times.values():
        kernel.ratios.append((other / one, other_measured / measured))


def kernels(data: Path) -> Iterator[Kernel]:
    """All that the tables have of known models; of several versions the newest first."""
    sources: dict[str, Iterable[Group]] = {
        "prefill": tables.deepep_groups(data, "context", "prefill"),
        "decode": tables.deepep_groups(data, "generation", "decode"),
        "moe_perf": tables.moe_groups(data),
        "fused": tables.fused_groups(data),
    }
    for kind, groups in sources.items():
        for group in groups:
            kernel = Kernel(fitted(group, kind))
            if "left_out" not in kernel.is_:
                (judge_fused if kind == "fused" else judge)(kernel, group)
            yield kernel.close()
