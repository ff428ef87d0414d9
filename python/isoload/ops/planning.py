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
OBJECTIVES = ("spread", "local")  # the op's numbers


def fake_split(a: Any, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op's quota, peak, bound and telemetry, as shapes."""
    batch = a.tables.shape[:-1]
    return ints(like, *batch, a.num_slots), longs(like, *batch), longs(like, *batch), ints(like, *batch, 4)


def _fake_planning(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sent = 0 if a.rank is None else a.num_slots
    return *fake_split(a, a.loads), ints(a.loads, *a.tables.shape[:-1], sent)


_plan_exact = op("plan_exact", _fake_planning)


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
    """Splits every replicated expert's copies so that the busiest rank's cost is the least integers allow.

    Over-relaxed balancing sweeps, then shortest augmenting paths on ranks towards a Newton target; ends with
    ``peak == bound`` unless a tolerance or a budget ends it earlier. Generalises LPLB (papers/001) to integers.
    Of the many splits with this peak, objective chooses one.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
            [R, E] for objective "local" and for a rank.
        tables: of the same layers.
        fixed: [R] int32 copies that each rank carries besides (leading L as above).
        tolerance: stop at ``bound * (1 + tolerance)``; 0 = exact.
        budget: most augmentations; None = as many as it takes.
            A smaller budget may leave a higher peak; the bound stays true.
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        pour: [] int32 copies (leading L as above) that will be poured over the ranks afterwards, each on any rank:
            those of shared experts. peak and bound are then those of both together, and the split stops where
            pouring decides: at the level at which all ranks together have room for every copy.
        objective: "spread" levels the other ranks too; "local" keeps copies on their source rank, else its node.
            By the start of the solve: no optimum of these, only near it.
        ranks_per_node: divides R; None = R. Of the nodes of "local" and of send_counts.
        sweeps: most balancing sweeps; None = 4 for "spread", 0 for "local", whose start sweeps would undo.
        rank: the source rank whose send_counts are wanted; None = nobody's.
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
    """The op's objective, ranks_per_node, tolerance_ppm, sweeps and budget."""
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


def _fake_plan_waterfill(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch = a.copies.shape[:-2]
    return like(a.copies), longs(a.copies, *batch), longs(a.copies, *batch)


_plan_waterfill = op("plan_waterfill", _fake_plan_waterfill)


def plan_waterfill(
    copies: Tensor,
    tokens: Tensor,
    per_token: int = 1,
    ranks_per_node: int | None = None,
    *,
    ticks: Tensor | None = None,
    limits: Tensor | None = None,
) -> WaterfillSplit:
    """Pours the copies of the shared experts over the ranks' routed loads, up to the lowest level that holds them.

    No integer share has a lower peak, so ``peak == bound``. Every rank keeps what fits
    under the level, so no fewer copies could move. Of those that move as many as possible go where their source
    sends routed copies anyway, at most as many, and where it can choose within 3/4 of them (so many tokens there are
    about); then inside the node; then anywhere.
    Generalises Waterfill (papers/001) to integers and to whole batches without sampling.

    Args:
        copies: [R, R] or [L, R, R] int32 routed copies that source s sends to rank d, R in 1..1024.
        tokens: [R] or [L, R] int32 tokens of each source that need the shared experts.
        per_token: shared experts, 1..1024: every token has so many shared copies.
        ranks_per_node: divides R; None = all ranks are one node.
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        limits: [R] int32 most shared copies of a rank (0 = it holds no shared slot); None = no limit. They must
            hold all shared copies.
    """
    if ranks_per_node is None:
        ranks_per_node = copies.shape[-1] if copies.dim() else 1
    return WaterfillSplit(*call(_plan_waterfill, copies, tokens, per_token, ranks_per_node, ticks, limits))


# By dtype: default tolerance, default most iterations.
LIMITS = {torch.float32: (1e-4, 12), torch.float64: (1e-8, 20)}


def _fake_plan_lp(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, real = a.tables.shape[:-1], torch.float64 if a.float64 else torch.float32
    shapes = ((*batch, a.num_slots), batch, batch)
    split, primal, dual = (a.loads.new_empty(shape, dtype=real) for shape in shapes)
    return split, primal, dual, ints(a.loads, *batch), ints(a.loads, *batch)


_plan_lp = op("plan_lp", _fake_plan_lp)


def plan_lp(
    loads: Tensor,
    tables: ReplicaTables,
    *,
    base: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> LpSplit:
    """Splits every replicated expert's copies, in real numbers, so that the largest rank load is least.

    The linear program of LPLB (papers/001), by Mehrotra's predictor-corrector method with a dense Cholesky
    factorisation of the normal equations. Every rank and device computes the same bits. All ranks have the
    same speed; :func:`plan_exact` accepts ticks per rank.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
        tables: of the same layers.
        base: [R] of dtype, not negative: copies that each rank carries besides (leading L as above).
        dtype: float32 or float64, of everything real.
        tolerance: relative, 0..1; None = 1e-4 for float32, 1e-8 for float64.
        iterations: most, 0..1000; None = 12 for float32, 20 for float64. 0 gives the start:
            every expert evenly over its replicas.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    usual_tolerance, usual_iterations = LIMITS[dtype]
    tolerance = usual_tolerance if tolerance is None else tolerance
    iterations = usual_iterations if iterations is None else iterations
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return LpSplit(*call(_plan_lp, loads, *layout, base, dtype == torch.float64, tolerance, iterations))


_plan_own = op("plan_own", lambda a: ints(a.counts, *a.tables.shape[:-1], a.num_slots))


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
    """How many of its own copies one source rank sends to each slot, where nothing is exchanged in the batch.

    An integer split near the least sum over ranks of ``(base_r + y_r) ** 2``, where ``y_r`` of the source's copies go
    to rank r and ``base_r`` is its offset, fixed copies and a rotation in 0..1 that differs between sources, ranks and
    layers: many sources of few copies then do not round to the same rank. The op sweeps over the replicated experts and
    does not prove the least sum; bench/bench_own_split.py counts the splits that a move would improve. Every copy is
    sent, and no slot of another expert takes one; what all sources send together is level on average, and proved
    nowhere.

    Args:
        counts: [E] int32 this source's copies (with a leading L if the tables have one), together at most
            2^31 / (R + 2).
        tables: of the same layers.
        offset: [R] int32 (leading L as above) what this source shall take each rank to carry already, in 2^-20 of its
            copies, 0..2^20; see :func:`isoload.balancing.targets.offsets`. Zeros: level the source's own copies.
        source: this rank, 0..R-1.
        fixed: [R] int32 copies of this source that each rank carries besides (leading L as above).
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each. The sum is then that of
            ``ticks_r * (base_r + y_r) ** 2``: ranks draw level in cost.
        recent: [E] int64 (leading L as above), decayed sums of the counts of batches in 2^-16 copies, with a half-life
            of eight batches: this batch's counts are added in place.
        sent: [3, R] int64 (leading L as above), written in place: sums decayed as those of the copies sent to every
            rank and of the fixed ones, then how many of both this batch sends there.
        layer: of the first of these layers; turns the rotation.
        sweeps: most sweeps; they end sooner where none moves a copy.

    Returns:
        [P] int32 (leading L as above): a row for :func:`route`.
    """
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return call(_plan_own, counts, *layout, offset, fixed, ticks, recent, sent, source, layer, sweeps)


_round_split = op("round_split", lambda a: ints(a.split, *a.split.shape))


def round_split(split: Tensor, loads: Tensor, tables: ReplicaTables) -> Tensor:
    """Whole copies from a real-valued split, every expert's adding up to its load exactly.

    Largest remainder: the whole parts, then one copy each to the largest fractions, ties to the lowest slot. Every
    quota is less than one copy from its split, as far as the split itself adds up to the load.

    Args:
        split: [P] float32 or float64 copies per slot (leading L as the tables), as :func:`plan_lp` returns; for
            every expert its sum is the load, up to one copy and a thousandth.
        loads: [E] or [R, E] int32 copies, of which the split was made.
        tables: of the same layers.

    Returns:
        [P] int32 quota.
    """
    return call(_round_split, split, loads, tables.data, tables.num_ranks, tables.num_slots)


_plan_active = op("plan_active", lambda a: fake_split(a, a.loads))


def plan_active(loads: Tensor, tables: ReplicaTables) -> ActiveSplit:
    """Puts all copies of an expert on one of its replicas, so that no rank has more active slots than it must.

    For decode batches: while reading weights takes longer than computing, a rank's time is its number of
    active slots, and a replicated expert is read on every rank that takes a part. The number is the least possible
    (the flow of :func:`plan_exact` with one unit per expert); the peak in copies is then lowered move by move,
    without a promise to be the least at this number.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
        tables: of the same layers.
    """
    return ActiveSplit(*call(_plan_active, loads, tables.data, tables.num_ranks, tables.num_slots))


def _fake_plan_joint(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch = a.tables.shape[:-1]
    share = ints(a.loads, *batch, a.num_ranks, a.num_ranks)
    return *fake_split(a, a.loads), ints(a.loads, *batch, a.num_slots), share


_plan_joint = op("plan_joint", _fake_plan_joint)


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
    """The exact split of the routed experts that leaves room for the shared copies, and those poured over it.

    By one kernel, with their bits: :func:`plan_exact` whose ``pour`` is all shared copies, :func:`share_by_rank`,
    :func:`plan_waterfill` with candidates "all", and :func:`share` of one source rank in the order "locality".
    Without sweeps and budget the routed copies are spread evenly, and peak is the least beside that.

    Args:
        loads: [R, E + n] or [L, R, E + n] int32 copies per source rank. The last n columns are those of the shared
            experts, each of which every token needs: the first of them is read.
        tables: of the routed experts.
        rank: the source rank whose send_counts are wanted.
        num_shared: n, 1..1024; every rank holds all of them.
        first_shared: place of the first one among a rank's slots, 0..S-n.
        ranks_per_node: divides R; None = R.
        tolerance, budget, ticks, objective, sweeps: as in :func:`plan_exact`.
    """
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    layout = (tables.data, tables.num_ranks, tables.num_slots)
    return JointSplit(*call(_plan_joint, loads, *layout, num_shared, first_shared, ticks, *options, rank))
