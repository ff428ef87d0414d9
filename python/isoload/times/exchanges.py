"""Time of dispatch and combine by the tokens of a rank, and of a whole layer by the loads of its slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf, log2
from typing import Any, NamedTuple

import numpy as np

from isoload.times.experts import ExpertTime, Floats, Row, numbers, read, select
from isoload.wording import not_one_of

STEPS = ("dispatch", "combine")
MOST_NODES = 128
LARGEST_DOMAIN = 72  # GPUs that share NVLink, GB200 NVL72
SETTING = "{gpu}, {ranks} ranks on {nodes} nodes, rows of {hidden}, top-{top_k}"
# DeepEP's two modes were measured over nodes only under SGLang. vLLM calls the same kernels.
SAME_KERNELS = {"vllm_deepep_ht": "sglang_deepep_normal", "vllm_deepep_ll": "sglang_deepep_low_latency"}
# A call's growth for twice as many ranks in one NVLink domain: the largest in the shipped tables from 8 ranks on
# (TensorRT-LLM's all-to-alls on GB200, 8 to 64 ranks).
CALL_GROWTH = 1.27
DEFAULT_BANDWIDTHS = (400.0, 50.0)  # GB/s of a rank, inside a node and between: NVLink 4, one 400 Gb/s NIC
# GB/s at which a rank reads weights of its peers: NVLink 4 as above; NVLink 5 as UltraEP measured it, 706 to 715.
PEER_BANDWIDTHS = {"h100": 400.0, "h200": 400.0} | dict.fromkeys(("b200", "b300", "gb200", "gb300"), 710.0)
DEEPSEEK_V3_FP8 = 3 * 7168 * 2048  # bytes of an expert
DEEPSEEK_V3_TOKEN_US = 0.147  # microseconds of one copy in a large GEMM of such experts: 600 TFLOP/s, an H100


class Curve(NamedTuple):
    """(a^q + (s tokens)^q)^(1/q) microseconds: a call takes a for few tokens, and s per token of a rank for many."""

    a_us: float
    s_us: float
    q: float

    def __call__(self, tokens: Floats) -> Floats:
        large = np.maximum(self.s_us * tokens / self.a_us, 1e-12)
        return np.asarray(
            self.a_us * np.maximum(large, 1) * (1 + np.minimum(large, 1 / large) ** self.q) ** (1 / self.q)
        )


@dataclass(frozen=True)
class AllToAllTime:
    """One step, dispatch or combine, of an all-to-all among `ranks` on `nodes`.

    The tables contain only even routing, so the cost of a busier rank is unknown. Therefore times are ranges: `low` is
    the time of even rows (links are not the limit, or the slow rank overlaps), `high` the time if every rank had as
    many rows as the busiest.

    If this group was not measured, `low` is the exchange inside of one node, and `high` the nearest measured one over
    as many nodes or more, with tokens at least as long. Beyond all measured sizes, `low` follows the nearest of them,
    or fewer rows if this size sends fewer, and `high` follows the rows that leave a rank and the calls' growth.
    """

    gpu: str
    kernel: str
    step: str
    ranks: int
    nodes: int
    low: Curve
    high: Curve
    tokens_to: float = float("inf")
    fit_error: float | None = None
    measured: bool = True  # whether the tables have these ranks, nodes and rows
    note: str = ""  # the setting in which `high` was measured, if it is another one
    source: str = "given"
    extrapolated_from: str = ""  # the measured sizes, if this size is beyond or between them

    @classmethod
    def load(
        cls, gpu: str, kernel: str, step: str, *, hidden: int, top_k: int, ranks: int, nodes: int = 1
    ) -> AllToAllTime:
        """Return shipped constants, which :func:`available` lists, or a range derived from them.

        hidden, top_k: as measured. ranks: 1 to 1,024, at most 72 of them on a node (an NVLink domain). nodes: 1 to 128.
        """
        if step not in STEPS:
            raise ValueError(not_one_of("step", STEPS, step))
        if not 1 <= nodes <= MOST_NODES or ranks < 1 or ranks % nodes:
            raise ValueError(f"nodes must be in 1..{MOST_NODES} and divide ranks {ranks}, got {nodes}")
        if (per_node := ranks // nodes) > LARGEST_DOMAIN:
            raise ValueError(
                f"ranks_per_node must be at most {LARGEST_DOMAIN}, the largest NVLink domain, got {per_node}: pass the "
                "number of GPUs that share NVLink, such as 8"
            )
        table = read("exchanges")
        rows = select(select(table, gpu=gpu, kernel=kernel), hidden=hidden, top_k=top_k)
        if same := [row for row in rows if (row["ranks"], row["nodes"]) == (ranks, nodes)]:
            row = same[0]
            curve, limits = Curve(*row[step]), (row["tokens_to"], row["fit_error"])
            return cls(gpu, kernel, step, ranks, nodes, curve, curve, *limits, source=row["source"])
        sizes = _sizes(rows)
        inside, (low, high) = _inside(rows, step, per_node)
        from_sizes = "" if per_node == inside["ranks"] else sizes
        nearest = inside
        if nodes > 1:
            nearest, high = _between(table, gpu, kernel, step, hidden, top_k, nodes)
            if nearest["kernel"] != kernel:
                high = _added(Curve(*inside[step]), high, table, nearest, step)
            if nodes > nearest["nodes"]:
                from_sizes = _sizes((*rows, nearest))
                low = Curve(*nearest[step]) if nearest in rows else low
        note = "" if nearest is inside else SETTING.format(**nearest)
        if nearest["kernel"] != kernel:
            note += f", under {nearest['kernel']}"
        tokens_to = min(inside["tokens_to"], nearest["tokens_to"])
        error = max(inside["fit_error"], nearest["fit_error"])
        at = gpu, kernel, step, ranks, nodes, low, high, tokens_to, error
        return cls(*at, measured=False, note=note, source=inside["source"], extrapolated_from=from_sizes)

    def seconds(self, tokens: Any, busiest: Any = 1.0, crossing: Any = 1.0) -> Floats:
        """Return [..., 2] from and to what the step takes.

        Args:
            tokens: [...] on a rank before the step, on average.
            busiest: [...] rows of the busiest rank over the mean, at least 1.
            crossing: [...] rows to other nodes over those of even routing; a measured `low` follows them too.
        """
        mean, factor = numbers("tokens", tokens), numbers("busiest", busiest, least=1.0)
        rows = numbers("crossing", crossing) if self.nodes > 1 else np.float64(1.0)
        even = mean * rows if self.measured else mean
        low, high = np.broadcast_arrays(self.low(even), self.high(mean * factor * rows))
        return 1e-6 * np.stack([np.minimum(low, high), high], -1)

    def extrapolated(self, tokens: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return [...] whether ranks hold more tokens than were measured."""
        return np.asarray(numbers("tokens", tokens) > self.tokens_to)


def _inside(rows: tuple[Row, ...], step: str, ranks: int) -> tuple[Row, tuple[Curve, Curve]]:
    """Return the measured row nearest to an exchange inside of one node, and its range of curves."""
    measured = [row for row in rows if row["nodes"] == 1]
    nearest = min(measured, key=lambda row: (abs(log2(row["ranks"] / ranks)), row["ranks"]))
    curve = Curve(*nearest[step])
    return nearest, _scaled(curve, nearest["kernel"], nearest["top_k"], nearest["ranks"], ranks)


def _scaled(curve: Curve, kernel: str, top_k: int, measured: int, ranks: int) -> tuple[Curve, Curve]:
    """Return the range of an exchange of `ranks` ranks inside of one node, from the curve of another number."""
    if measured == ranks:
        return curve, curve
    part = rows_leaving(kernel, top_k, ranks) / rows_leaving(kernel, top_k, measured)
    doublings = max(log2(ranks / measured), 0.0)
    low = curve._replace(s_us=min(part, 1.0) * curve.s_us)
    return low, curve._replace(s_us=max(part, 1.0) * curve.s_us, a_us=CALL_GROWTH**doublings * curve.a_us)


def other_size(time: AllToAllTime, top_k: int, ranks: int) -> AllToAllTime:
    """Return the times of an exchange inside of one node, among another number of ranks than was measured."""
    low, high = _scaled(time.high, time.kernel, top_k, time.ranks, ranks)
    sizes = "" if ranks == time.ranks else f"{time.ranks} ranks on 1 node"
    return replace(time, ranks=ranks, low=low, high=high, measured=not sizes, extrapolated_from=sizes)


def _between(
    table: tuple[Row, ...], gpu: str, kernel: str, step: str, hidden: int, top_k: int, nodes: int
) -> tuple[Row, Curve]:
    """Return the measured row nearest to an exchange over nodes, of any GPU, and the curve of `nodes` nodes.

    Beyond the measured nodes a token's time follows the rows that leave a node, and a call grows with every doubling of
    the nodes as it did with the last measured doubling.
    """
    names = kernel, SAME_KERNELS.get(kernel, kernel)
    wide = [row for row in table if row["kernel"] in names and row["nodes"] > 1]
    fitting = [row for row in wide if row["hidden"] >= hidden and row["top_k"] >= top_k]
    if not fitting:
        raise ValueError(
            f"nodes must be 1 for kernel {kernel}, which was not measured between nodes, got {nodes}"
        )

    def order(row: Row) -> tuple[Any, ...]:
        return row["gpu"] != gpu, row["nodes"], row["hidden"], row["top_k"]

    if enough := [row for row in fitting if row["nodes"] >= nodes]:
        nearest = min(enough, key=order)
        return nearest, Curve(*nearest[step])
    nearest = max(fitting, key=lambda row: row["nodes"])
    curve, before = Curve(*nearest[step]), _before(fitting, nearest, step)
    more, fewer = (rows_leaving(nearest["kernel"], top_k, number) for number in (nodes, nearest["nodes"]))
    growth = max(curve.a_us / before.a_us, 1.0) if before else CALL_GROWTH
    doublings = log2(nodes / nearest["nodes"])
    return nearest, curve._replace(s_us=more / fewer * curve.s_us, a_us=growth**doublings * curve.a_us)


def _before(rows: list[Row], last: Row, step: str) -> Curve | None:
    """Return the curve of half as many nodes as the last measured ones, in the same setting."""
    names = "gpu", "kernel", "hidden", "top_k"
    half = [row for row in rows if all(row[name] == last[name] for name in names)]
    return next((Curve(*row[step]) for row in half if 2 * row["nodes"] == last["nodes"]), None)


def _added(inside: Curve, high: Curve, table: tuple[Row, ...], nearest: Row, step: str) -> Curve:
    """Return a kernel's curve inside of a node plus what nodes add to the same exchange under another engine."""
    names = "gpu", "kernel", "hidden", "top_k"
    same = (row for row in table if row["nodes"] == 1 and all(row[name] == nearest[name] for name in names))
    other = Curve(*next(same)[step])
    return inside._replace(
        a_us=inside.a_us + max(high.a_us - other.a_us, 0.0),
        s_us=inside.s_us * max(high.s_us / other.s_us, 1.0),
    )


def sends_copies(kernel: str) -> bool:
    """Return whether a dispatch sends a row for each expert of a token, not one for each part of a group."""
    return kernel.endswith(("low_latency", "_ll"))


def rows_leaving(kernel: str, top_k: int, parts: int) -> float:
    """Return the rows of a token that leave its own part (rank of a node, or node) of a group, by even routing."""
    if sends_copies(kernel):
        return top_k * (parts - 1) / parts
    return (parts - 1) * (1 - (1 - 1 / parts) ** top_k)


def _sizes(rows: Iterable[Row]) -> str:
    """Return the sizes of measured rows: "8 to 64 ranks on 1 to 8 nodes"."""
    ranks, nodes = ({row[name] for row in rows} for name in ("ranks", "nodes"))
    return f"{_span(ranks)} ranks on {_span(nodes)} {'node' if nodes == {1} else 'nodes'}"


def _span(values: set[int]) -> str:
    return f"{min(values)} to {max(values)}" if len(values) > 1 else str(min(values))


@dataclass(frozen=True)
class LayerTime:
    """Dispatch, the slowest rank's experts, combine, one after the other."""

    dispatch: AllToAllTime | None  # None: no rows travel, or the experts' time contains them (megamoe)
    experts: ExpertTime
    combine: AllToAllTime | None

    def seconds(self, copies: Any, rows: Any, tokens: Any = 0, crossing: Any = 1.0) -> Floats:
        """Return [..., 2] from and to what the layer takes; arguments as those of :meth:`parts`."""
        experts, dispatch, combine = self.parts(copies, rows, tokens, crossing)
        return np.asarray(experts.max(-1)[..., None] + dispatch + combine)

    def parts(
        self, copies: Any, rows: Any, tokens: Any = 0, crossing: Any = 1.0
    ) -> tuple[Floats, Floats, Floats]:
        """Return [..., R] the time of each rank's experts; [..., 2] from and to what dispatch takes, and combine.

        Args:
            copies: [..., R, slots of a rank] that each slot computes.
            rows: [..., R] that each rank receives: distinct tokens.
            tokens: [...] on a rank before the dispatch, on average.
            crossing: [...] rows to other nodes over those of even routing.
        """
        slot_copies, received = numbers("copies", copies), numbers("rows", rows)
        if slot_copies.ndim < 2 or received.shape != slot_copies.shape[:-1]:
            shapes = f"{list(received.shape)} with copies {list(slot_copies.shape)}"
            raise ValueError(f"rows must be [..., ranks] and copies [..., ranks, slots], got {shapes}")
        experts = self.experts.seconds(slot_copies, received)
        busiest = np.maximum(received.max(-1) / np.maximum(received.mean(-1), 1e-300), 1)
        none, steps = np.zeros((*busiest.shape, 2)), (self.dispatch, self.combine)
        dispatch, combine = (step.seconds(tokens, busiest, crossing) if step else none for step in steps)
        return experts, dispatch, combine

    def without_exchange(self, copies: Any, tokens: Any, transfer_s: float = 0.0) -> Floats:
        """Return [...] seconds in which a rank computes its own tokens with all experts.

        The weights that it lacks arrive in transfer_s while it computes the layer before (DWDP): the longer of both
        counts.
        """
        return np.maximum(self.experts.seconds(copies, tokens), transfer_s)


def break_even(expert_bytes: float, bandwidth: float, token_us: float) -> int:
    """Return the copies from which borrowing an expert pays, if no compute hides its transfer; bandwidth: GB/s."""
    for name, value in (("expert_bytes", expert_bytes), ("bandwidth", bandwidth), ("token_us", token_us)):
        if not 0 < value < inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
    return ceil(expert_bytes / (bandwidth * 1e3) / token_us)


def assumed_experts(num_bytes: float, num_weights: float) -> ExpertTime:
    """Return times of an H100's experts by arithmetic: weights are read at 3.35 TB/s, copies at DeepSeek-V3's rate."""
    times = 0.0, num_bytes / 3.35e6, DEEPSEEK_V3_TOKEN_US * num_weights / DEEPSEEK_V3_FP8, 0.0, 2.0
    return ExpertTime("h100", "assumed", "", 0, 0, *times, source="assumed")
