"""Fills by levels: plan time, and the distance of `llep` to a proved bound, by workload.

Fairness ledger
- Instances: W0-W7 at their default heat and W2 at heat 4, Zipf, log-normal, and LLEP's three concentrations
  (bench/workloads, top-8, step 7); the experts of the shipped trace, and of --traces, in the shares of their largest
  batch, 3 layers each. 33k copies and more, experts in order, no replicas.
- Quality: peak / bound - 1, where peak is the exact split's over the slots that llep fills (chunks of 1) and bound what
  spill_bound.py proves; part of the gap is the bound's, all the more where spare slots are few. Gaps are shown with
  2, 4 and 8 spare slots, everything else is with 8.
- spill_cost: 1000 copies per import and per export. llep_published: capacity 1.1, chunks of 1024, as many spare slots
  as it likes. Peaks are max / mean copies of the ranks. Moves: experts borrowed / most by one rank / most of one rank.
- Time: one op call, one layer, one thread; the median of every instance, over 16 kinds of loads x 1-4 spare slots x
  one node or nodes of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload import ops
from isoload.policies.published_borrowing import llep_published
from isoload.traces import read_trace
from lib import table
from lib.harness import command, measure, write_results
from lib.spill_bound import level_bound, slots_bound
from lib.trace_files import SHIPPED, present
from workloads import W0_TO_W7, make_workload

SHAPES = ((8, 64), (8, 128), (16, 256), (32, 256))
COPIES = (33_792, 67_584, 262_144)  # of a group of 8 ranks; larger groups have more in proportion
TOP_K, STEP, IMPORT = 8, 7, 1000
SPARE = (2, 4, 8)
LOOSE = 0.005  # gap above which the bound is worth a linear program
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"W{i} {name}": (name, {}) for i, name in enumerate(W0_TO_W7)},
    "W2 hot_rank, heat 4": ("hot_rank", {"heat": 4}),
    "Zipf 0.8": ("zipf", {"exponent": 0.8, "clip": True}),
    "Zipf 1.2": ("zipf", {"exponent": 1.2, "clip": True}),
    "log-normal": ("lognormal", {"clip": True}),
    "80 % on 4": ("concentrated", {"share": 0.8, "num_hot": 4, "repeat": True}),
    "95 % on 1": ("concentrated", {"share": 0.95, "num_hot": 1, "repeat": True}),
    "50 % on 16": ("concentrated", {"share": 0.5, "num_hot": 16, "repeat": True}),
}
TRACES = (
    "dsv3_sglang_longin",
    "glm52_domains_a",
    "dsv2lite_esft_intent",
    "gemma4_26b_themes",
    "qwen3_30b_decode_totals",
    "switch128_cocktail",
)
COST = {"import_costs": (IMPORT, IMPORT), "export_costs": (IMPORT, IMPORT)}


def made() -> Iterator[tuple[str, int, np.ndarray]]:
    """(kind, ranks, [E] loads) of every workload."""
    for kind, (name, options) in KINDS.items():
        for ranks, experts in SHAPES:
            shape = {"num_ranks": ranks, "num_experts": experts, "top_k": TOP_K}
            for copies in COPIES:
                tokens = copies // 8 // TOP_K
                yield (
                    kind,
                    ranks,
                    make_workload(name, **shape, tokens_per_rank=tokens, **options).expert_loads(STEP),
                )


def recorded(path: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """The same of a trace: copies drawn in the shares of its largest batch."""
    trace = read_trace(path)
    assert trace.counts is not None
    batch = trace.counts[trace.counts.sum((1, 2)).argmax()]
    for layer in np.linspace(0, trace.num_layers - 1, 3).astype(int):
        for copies in COPIES:
            shares = batch[layer] / batch[layer].sum()
            yield path.stem, 8, np.random.default_rng(copies).multinomial(copies, shares)


def in_order(loads: np.ndarray, ranks: int, spare: int) -> Callable[..., ops.SlotFill]:
    """plan_fill with E / R experts per rank, one replica each, and spare slots after them; called with its rules."""
    slots = torch.full((ranks, len(loads) // ranks + spare), -1, dtype=torch.int32)
    slots[:, : len(loads) // ranks] = torch.arange(len(loads), dtype=torch.int32).view(ranks, -1)
    home = (slots.flatten() >= 0).nonzero().flatten().int()
    copies = torch.from_numpy(loads.astype(np.int32))
    return partial(ops.plan_fill, copies, slots.flatten(), home, ranks, spare, None)


def judge(kind: str, ranks: int, loads: np.ndarray) -> dict[str, Any]:
    cases = {spare: in_order(loads, ranks, spare) for spare in SPARE}
    homes, mean, copies = (
        loads.reshape(ranks, -1),
        loads.sum() / ranks,
        torch.from_numpy(loads.astype(np.int32)),
    )

    def peak(fill: ops.SlotFill) -> int:
        tables = ops.replica_tables(fill.slot_to_expert, ranks, len(loads))
        return int(ops.plan_exact(copies, tables).peak)

    row: dict[str, Any] = {"kind": kind, "ranks": ranks, "experts": len(loads), "copies": int(loads.sum())}
    row["ep_peak"] = homes.sum(1).max() / mean
    for spare, fill in cases.items():
        reached, least = peak(fill()), float(slots_bound(homes.tolist(), 0, spare))
        if reached > (1 + LOOSE) * least:
            least = max(least, level_bound(homes.tolist(), spare))
        row[f"gap_spare{spare}"] = reached / least - 1
    for policy, rules in (("llep", {}), ("spill_cost", COST)):
        fill = cases[SPARE[-1]](**rules)
        row[f"{policy}_peak"] = peak(fill) / mean
        row[f"{policy}_moves"] = fill.telemetry[:3].tolist()
    return row | published(loads, ranks)


def published(loads: np.ndarray, ranks: int) -> dict[str, Any]:
    load, pairs = np.zeros(ranks), set()
    for expert, rank, first, last in llep_published(loads.tolist(), ranks):
        load[rank] += last - first
        if rank != expert * ranks // len(loads):
            pairs.add((expert, rank))
    imports = np.bincount([rank for _, rank in pairs], minlength=ranks)
    exports = np.bincount([expert * ranks // len(loads) for expert, _ in pairs], minlength=ranks)
    moves = [len(pairs), int(imports.max()), int(exports.max())]
    return {"llep_published_peak": load.max() / load.mean(), "llep_published_moves": moves}


def timed_instances(ranks: int, experts: int) -> Iterator[tuple[str, Callable[..., ops.SlotFill]]]:
    rng, index = np.random.default_rng(1), np.arange(1, experts + 1)
    weights = {f"Zipf {a}": 1 / index**a for a in (0.6, 0.8, 1.0, 1.2, 1.5)}
    weights |= {f"log-normal {s}": rng.lognormal(0, s, experts) for s in (0.5, 1, 1.5, 2)}
    for hot, share in ((1, 0.3), (4, 0.5), (16, 0.5), (16, 0.9), (40, 0.6), (64, 0.8), (128, 0.8)):
        some = np.where(np.arange(experts) < hot, share / hot, (1 - share) / (experts - hot))
        weights[f"{share:.0%} on {hot}"] = some
    for name, some in weights.items():
        for spare in (1, 2, 3, 4):
            loads = rng.multinomial(ranks * 32_768, rng.permutation(some) / some.sum())
            yield f"{name}, {spare} spare slots", in_order(loads, ranks, spare)


def times() -> list[dict[str, Any]]:
    """A row per policy and shape: the median instance, the slowest and its name."""
    rows = []
    for ranks in (8, 64):
        for policy, rules in (("llep", {"min_chunk": 1024}), ("spill_cost", COST)):
            found = {}
            for name, fill in timed_instances(ranks, 256):
                for per_node, costs in ((ranks, (IMPORT, IMPORT)), (8, (IMPORT, 8 * IMPORT))):
                    asked = {**rules, "ranks_per_node": per_node}
                    asked |= dict.fromkeys(COST, costs) if policy == "spill_cost" else {}
                    timing = measure(partial(fill, **asked), seconds=0.02)
                    found[f"{name}, nodes of {per_node}"] = timing.median
            slowest = max(found, key=lambda name: found[name])
            us = {"median_us": float(np.median(list(found.values()))), "slowest_us": found[slowest]}
            rows.append({"time": policy, "ranks": ranks, "experts": 256, **us, "slowest": slowest})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    policies = ("llep_published", "llep", "spill_cost")
    head = ["workload", "copies / rank", "EP", *policies, *(f"gap, {spare} spare" for spare in SPARE)]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["copies"] // row["ranks"]):
        groups.setdefault((row["kind"], row["copies"] // row["ranks"]), []).append(row)
    lines = []
    for (kind, copies), part in groups.items():
        cells = [kind, str(copies), f"{np.mean([row['ep_peak'] for row in part]):.3f}"]
        for policy in policies:
            moves = np.array([row[f"{policy}_moves"] for row in part])
            peak = np.mean([row[f"{policy}_peak"] for row in part])
            cells.append(f"{peak:.3f} {moves[:, 0].mean():.1f}/{moves[:, 1].max()}/{moves[:, 2].max()}")
        lines.append([*cells, *(f"{max(row[f'gap_spare{spare}'] for row in part):.2%}" for spare in SPARE)])
    title = "llep and spill_cost by workload: means over shapes; moves: mean / most in / most out"
    table.show(title, " | ".join(head), lines)
    for spare in SPARE:
        gaps = [row[f"gap_spare{spare}"] for row in rows]
        print(
            f"{len(gaps)} instances, {spare} spare slots: gap mean {np.mean(gaps):.2%}, most {max(gaps):.2%}"
        )


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, help="folder with npz files; missing ones are named")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    timings = times()
    for row in timings:
        print(
            f"{row['time']}, R={row['ranks']}: {row['median_us']:.1f} us, {row['slowest_us']:.1f} us at most"
        )
    files = [SHIPPED, *(present(asked.traces, *TRACES).values() if asked.traces else ())]
    instances = [*made(), *(found for path in files for found in recorded(path))]
    rows = [judge(*instance) for instance in instances]
    show(rows)
    print(write_results("bench_fill", timings + rows))


if __name__ == "__main__":
    main()
