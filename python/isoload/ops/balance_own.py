"""balance_own: from a rank's topk_ids to slots by its own counts alone; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, ints, like, op
from isoload.ops.tables import ReplicaTables

_balance_own = op("balance_own", lambda a: (like(a.topk_ids), ints(a.topk_ids, a.num_experts)))


def balance_own(
    topk_ids: Tensor,
    tables: ReplicaTables,
    offset: Tensor,
    source: int,
    *,
    ticks: Tensor | None = None,
    recent: Tensor | None = None,
    sent: Tensor | None = None,
    layer: int = 0,
    sweeps: int = 6,
) -> tuple[Tensor, Tensor]:
    """:func:`count`, :func:`plan_own` and :func:`route` in one op: the same slots. On a GPU one kernel of few copies.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts, each with a replica; -1 = masked.
        tables: of this layer.
        offset, source, ticks, recent, sent, layer, sweeps: see :func:`plan_own`.

    Returns:
        [T, K] slots in the dtype of topk_ids, -1 where masked; and [E] int32 counts.

    Raises:
        ValueError: naming the argument, the rule and the value; ``recent`` and ``sent`` are then as they were.
    """
    where = (tables.data, tables.num_experts, tables.num_ranks, tables.num_slots)
    return call(_balance_own, topk_ids, *where, offset, ticks, recent, sent, source, layer, sweeps)
