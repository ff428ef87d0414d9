"""balance_same: from topk_ids that all ranks hold alike to slots, by the exact split; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.ops.plan_exact import Objective, arguments, fake_split
from isoload.replica_tables import ReplicaTables
from isoload.results import ExactSplit

_balance_same = library.balance_same.default


def balance_same(
    topk_ids: Tensor,
    tables: ReplicaTables,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
) -> tuple[Tensor, Tensor, ExactSplit]:
    """:func:`count`, :func:`plan_exact` and :func:`route` in one op, where all copies count as rank 0's.

    Its share of the quota is then the quota: every rank computes the same slots, and nothing is exchanged.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts, each with a replica; -1 = masked.
        tables: of this layer.
        tolerance, budget, ticks, objective, ranks_per_node, sweeps: see :func:`plan_exact`.

    Returns:
        [T, K] slots in the dtype of topk_ids, -1 where masked; [R, E] int32 loads, 0 but for rank 0's; the
        split, whose send_counts are rank 0's.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    _, data, num_ranks, num_slots, _, ticks, _, *options = arguments(
        topk_ids, tables, None, tolerance, budget, ticks, None, objective, ranks_per_node, sweeps
    )
    slots, loads, quota, peak, bound, telemetry = call(
        _balance_same, topk_ids, data, tables.num_experts, num_ranks, num_slots, ticks, *options
    )
    return slots, loads, ExactSplit(quota, peak, bound, telemetry, quota)


@torch.library.register_fake("isoload::balance_same")
def _(
    topk_ids: Tensor,
    tables: Tensor,
    num_experts: int,
    num_ranks: int,
    num_slots: int,
    ticks: Tensor | None,
    objective: int,
    ranks_per_node: int,
    tolerance_ppm: int,
    sweeps: int,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loads = topk_ids.new_empty((num_ranks, num_experts), dtype=torch.int32)
    return topk_ids.new_empty(topk_ids.shape), loads, *fake_split(loads, tables, num_slots)
