"""share_alone: one source rank's part of a quota where only sums over ranks are known; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, like, op
from isoload.ops.tables import ReplicaTables

_share_alone = op("share_alone", lambda a: like(a.quota))


def share_alone(
    counts: Tensor,
    quota: Tensor,
    tables: ReplicaTables,
    source: int,
    *,
    past: bool = False,
    recent: Tensor | None = None,
) -> Tensor:
    """How many of its own copies one source rank sends to each slot, without the other ranks' counts.

    For loads that were all-reduced, not gathered: each source cuts its copies of an expert in the proportions
    of the expert's quotas, rounded at an offset of its own (golden ratio), so that roundings nearly cancel over
    sources. A source sends exactly its copies. Over all sources slot p receives ``quota[p]`` give or take
    ``max(0, sources with copies of its expert - 1)``, and exactly that where an expert has all its quota in one
    slot. Where the loads of all sources are known, :func:`share` is exact always.

    Args:
        counts: [E] or [L, E] int32 this source's copies, a part of the sums that the quota was made from.
        quota: [P] or [L, P] int32.
        tables: of the same layers.
        source: this rank, 0..R-1.
        past: the quota is of batches before, so counts need not be a part of their sums: an expert's copies are cut in
            the proportions of its quotas, level over its replicas where all are 0. A slot then gets about its part.
        recent: [E] int64 (leading L as above), decayed sums of counts as in :func:`isoload.ops.plan_own`: these are
            added in place.

    Returns:
        [P] int32 (with a leading L if counts have one): a row for :func:`route`.
    """
    if not 0 <= source < tables.num_ranks:
        raise ValueError(f"source must be in 0..{tables.num_ranks - 1}, got {source}")
    return call(_share_alone, counts, quota, tables.data, source, past, recent)
