"""Ops that split the copies of replicated experts over their slots: exact, active, joint, waterfill, lp and own."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from isoload.ops.library import call, ints, like, longs, op
from isoload.ops.results import ActiveSplit, ExactSplit, JointSplit, LpSplit, WaterfillSplit
from isoload.ops.tables import ReplicaTables
from isoload.wording import not_one_of

UNLIMITED = 2**31 - 1
Objective = Literal["spread", "local"]
OBJECTIVES = ("spread", "local")  # in the order of the op's numbers


def fake_split(a: Any, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = a.tables.shape[:-1]
    return ints(like, *batch, a.num_slots), longs(like, *batch), longs(like, *batch), ints(like, *batch, 4)


@op("plan_exact")
def _plan_exact(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sent = 0 if a.rank is None else a.num_slots
    return *fake_split(a, a.loads), ints(a.loads, *a.tables.shape[:-1], sent)


def plan_exact(
    loads: Tensor,
    tables: ReplicaTables,
    fixed: Tensor | None = None,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    pour: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
    rank: int | None = None,
) -> ExactSplit:
    """Split every replicated expert's copies so that the busiest rank's cost is the least that integers allow.

    Runs over-relaxed balancing sweeps, then shortest augmenting paths on ranks towards a Newton target: LPLB
    (papers/001) for integers. Ends with ``peak == bound`` unless a tolerance or a budget ends it earlier.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as the tables), summed over sources; "local" and rank need [R, E].
        tables: of the same layers.
        fixed: [R] int32 copies that each rank carries in addition (leading L as above).
        tolerance: stop at ``bound * (1 + tolerance)``; 0 = exact.
        budget: most augmentations; None = no limit. A smaller one may leave a higher peak; the bound remains valid.
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        pour: [] int32 shared copies (leading L as above) to distribute afterwards, each to any rank: peak and bound
            include them, and the split stops at the level at which all ranks have capacity for every copy.
        objective: among splits with this peak, "spread" levels all ranks; "local" keeps copies on their source rank,
            else its node, nearly as many as possible.
        ranks_per_node: divides R; None = R. Used by "local" and by send_counts.
        sweeps: most balancing sweeps; None = 4 for "spread", 0 for "local", whose start they would undo.
        rank: the source rank whose send_counts are returned; None = no rank.
    """
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return ExactSplit(*call(_plan_exact, loads, *layout, fixed, ticks, pour, *options, rank))


def split_options(
    tables: ReplicaTables,
    tolerance: float,
    budget: int | None,
    objective: Objective,
    ranks_per_node: int | None,
    sweeps: int | None,
) -> tuple[int, int, int, int, int]:
    if objective not in OBJECTIVES:
        raise ValueError(not_one_of("objective", OBJECTIVES, objective))
    if not 0 <= tolerance <= 1000:
        raise ValueError(f"tolerance must be in 0..1000 (relative), got {tolerance}")
    if budget is not None and budget < 0:
        raise ValueError(f"budget must be at least 0, got {budget}")
    return (
        OBJECTIVES.index(objective),
        tables.num_ranks if ranks_per_node is None else ranks_per_node,
        round(tolerance * 1_000_000),
        (4 if objective == "spread" else 0) if sweeps is None else sweeps,
        UNLIMITED if budget is None else min(budget, UNLIMITED),
    )


@op("plan_waterfill")
def _plan_waterfill(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch = a.copies.shape[:-2]
    return like(a.copies), longs(a.copies, *batch), longs(a.copies, *batch)


def plan_waterfill(
    copies: Tensor,
    tokens: Tensor,
    per_token: int = 1,
    ranks_per_node: int | None = None,
    *,
    ticks: Tensor | None = None,
    limits: Tensor | None = None,
) -> WaterfillSplit:
    """Distribute the shared copies over the ranks' routed loads, up to the lowest level that holds them.

    As few copies as possible move, as many of these as possible to ranks that their source visits: at most 3/4 of its
    routed copies there if it has a choice. Generalises Waterfill (papers/001) to integers; peak and bound are equal.

    Args:
        copies: [R, R] or [L, R, R] int32 routed copies that source s sends to rank d, R in 1..1024.
        tokens: [R] or [L, R] int32 tokens of each source that need the shared experts.
        per_token: number of shared experts, 1..1024: copies per token.
        ranks_per_node: divides R; None = all ranks are one node.
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        limits: [R] int32 most shared copies of a rank (0 = it has no shared slot); they add up to at least the
            shared copies. None = no limit.
    """
    if ranks_per_node is None:
        ranks_per_node = copies.shape[-1] if copies.dim() else 1
    return WaterfillSplit(*call(_plan_waterfill, copies, tokens, per_token, ranks_per_node, ticks, limits))


# Per dtype: default tolerance, default limit of iterations.
LIMITS = {torch.float32: (1e-4, 12), torch.float64: (1e-8, 20)}


@op("plan_lp")
def _plan_lp(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, real = a.tables.shape[:-1], torch.float64 if a.float64 else torch.float32
    shapes = ((*batch, a.num_slots), batch, batch)
    split, primal, dual = (a.loads.new_empty(shape, dtype=real) for shape in shapes)
    return split, primal, dual, ints(a.loads, *batch), ints(a.loads, *batch)


def plan_lp(
    loads: Tensor,
    tables: ReplicaTables,
    *,
    base: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> LpSplit:
    """Split every replicated expert's copies, in real numbers, so that the largest rank load is the least possible.

    Solves the linear program of LPLB (papers/001) by Mehrotra's method with a dense Cholesky factorisation; the bits
    are the same on every rank and device. All ranks have the same speed.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as the tables), summed over sources.
        tables: of the same layers.
        base: [R] of dtype, not negative: copies that each rank carries in addition (leading L as above).
        dtype: float32 or float64, of all real values.
        tolerance: relative, 0..1; None = 1e-4 for float32, 1e-8 for float64.
        iterations: limit, 0..1000; None = 12 for float32, 20 for float64; 0 = evenly over each expert's replicas.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    usual_tolerance, usual_iterations = LIMITS[dtype]
    tolerance = usual_tolerance if tolerance is None else tolerance
    iterations = usual_iterations if iterations is None else iterations
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return LpSplit(*call(_plan_lp, loads, *layout, base, dtype == torch.float64, tolerance, iterations))


_plan_own = op("plan_own")(lambda a: ints(a.counts, *a.tables.shape[:-1], a.num_slots))


def plan_own(
    counts: Tensor,
    tables: ReplicaTables,
    offset: Tensor,
    source: int,
    *,
    fixed: Tensor | None = None,
    ticks: Tensor | None = None,
    recent: Tensor | None = None,
    sent: Tensor | None = None,
    layer: int = 0,
    sweeps: int = 6,
) -> Tensor:
    """Split one source rank's own copies over the slots [P] int32, without any exchange in the batch.

    The result is an integer split near the least sum over ranks of ``ticks_r * (base_r + y_r) ** 2``, not proved.
    ``y_r`` is the number of the source's copies on rank r; ``base_r`` is its offset plus fixed copies plus a rotation
    in 0..1, so that many sources with few copies do not round to the same rank.

    Args:
        counts: [E] int32 this source's copies (leading L as the tables), together at most 2^31 / (R + 2).
        tables: of the same layers.
        offset: [R] int32 (leading L as above) load that this source assumes on each rank, in 2^-20 of its copies,
            0..2^20 (:func:`isoload.balancing.targets.offsets`). Zeros: level the source's own copies.
        source: this rank, 0..R-1.
        fixed: [R] int32 copies of this source that each rank carries in addition (leading L as above).
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        recent: [E] int64 (leading L as above), decayed sums of the counts in 2^-16 copies (half-life: 8 batches).
        sent: [3, R] int64 (leading L as above), written in place: decayed sums of the copies sent to every rank and of
            the fixed copies, then this batch's copies of both kinds to every rank.
        layer: number of the first of these layers; selects the rotation.
        sweeps: limit; the op ends earlier if a sweep moves no copy.
    """
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return call(_plan_own, counts, *layout, offset, fixed, ticks, recent, sent, source, layer, sweeps)


_round_split = op("round_split")(lambda a: ints(a.split, *a.split.shape))


def round_split(split: Tensor, loads: Tensor, tables: ReplicaTables) -> Tensor:
    """Round a real-valued split to whole copies [P] int32 that add up to each expert's load, by largest remainders.

    Args:
        split: [P] float32 or float64 copies per slot (leading L as the tables), as :func:`plan_lp` returns; for every
            expert its sum is the load, up to one copy and a thousandth.
        loads: [E] or [R, E] int32 copies from which the split was made.
        tables: of the same layers.
    """
    return call(_round_split, split, loads, tables.data, tables.num_ranks, tables.num_slots)


_plan_active = op("plan_active")(lambda a: fake_split(a, a.loads))


def plan_active(loads: Tensor, tables: ReplicaTables) -> ActiveSplit:
    """Put all copies of an expert on one of its replicas, so that the busiest rank has the fewest active slots.

    It is for decode batches, whose time is that of reading active slots' weights. The peak in copies may be higher.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as the tables), summed over sources.
        tables: of the same layers.
    """
    return ActiveSplit(*call(_plan_active, loads, tables.data, tables.num_ranks, tables.num_slots))


@op("plan_joint")
def _plan_joint(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch = a.tables.shape[:-1]
    share = ints(a.loads, *batch, a.num_ranks, a.num_ranks)
    return *fake_split(a, a.loads), ints(a.loads, *batch, a.num_slots), share


def plan_joint(
    loads: Tensor,
    tables: ReplicaTables,
    rank: int,
    num_shared: int,
    first_shared: int,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
) -> JointSplit:
    """Split the routed experts exactly, with the shared copies distributed above them, in one kernel.

    Returns the bits of :func:`plan_exact` with ``pour``, :func:`share_by_rank`, :func:`plan_waterfill`, :func:`share`.

    Args:
        loads: [R, E + n] or [L, R, E + n] int32 copies per source rank, the last n columns of the shared experts. These
            must be equal: only the first of them is read.
        tables: of the routed experts.
        rank: the source rank whose send_counts are returned.
        num_shared: n, 1..1024; every rank holds all of them.
        first_shared: position of the first one among a rank's slots, 0..S-n.
        ranks_per_node: divides R; None = R.
        tolerance, budget, ticks, objective, sweeps: as in :func:`plan_exact`. Sweeps and budget 0: spread evenly.
    """
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return JointSplit(*call(_plan_joint, loads, *layout, num_shared, first_shared, ticks, *options, rank))
