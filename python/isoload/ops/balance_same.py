"""balance_same: from topk_ids that all ranks hold alike to slots, by the exact split; wrapper and fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.ops.library import call, ints, like, op
from isoload.ops.planning import Objective, fake_split, split_options
from isoload.ops.results import ExactSplit
from isoload.ops.tables import ReplicaTables


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return like(a.topk_ids), ints(a.topk_ids, a.num_ranks, a.num_experts), *fake_split(a, a.topk_ids)


_balance_same = op("balance_same", _fake)


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
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    where = (tables.data, tables.num_experts, tables.num_ranks, tables.num_slots)
    found = call(_balance_same, topk_ids, *where, ticks, *options)
    slots, loads, quota, peak, bound, telemetry = found
    return slots, loads, ExactSplit(quota, peak, bound, telemetry, quota)
