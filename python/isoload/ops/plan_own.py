"""plan_own: one source rank's copies over the replicas, from its own counts alone; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.ops.tables import ReplicaTables

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
            copies, 0..2^20; see :func:`isoload.balancing.own_counts.offsets`. Zeros: level the source's own copies.
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
    where = (tables.data, tables.num_ranks, tables.num_slots)
    return call(_plan_own, counts, *where, offset, fixed, ticks, recent, sent, source, layer, sweeps)
