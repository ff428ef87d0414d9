"""balance_own: from a rank's topk_ids to slots by its own counts alone; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables

_balance_own = library.balance_own.default


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
    slots, counts = call(
        _balance_own,
        topk_ids,
        tables.data,
        tables.num_experts,
        tables.num_ranks,
        tables.num_slots,
        offset,
        ticks,
        recent,
        sent,
        source,
        layer,
        sweeps,
    )
    return slots, counts


@torch.library.register_fake("isoload::balance_own")
def _(
    topk_ids: Tensor,
    tables: Tensor,
    num_experts: int,
    num_ranks: int,
    num_slots: int,
    offset: Tensor,
    ticks: Tensor | None,
    recent: Tensor | None,
    sent: Tensor | None,
    source: int,
    layer: int,
    sweeps: int,
) -> tuple[Tensor, Tensor]:
    return topk_ids.new_empty(topk_ids.shape), topk_ids.new_empty((num_experts,), dtype=torch.int32)
