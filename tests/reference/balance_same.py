"""balance_same: the slots of rows that all ranks hold alike, by the exact split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.ops.results import ExactSplit
from isoload.ops.tables import ReplicaTables
from reference.count import count
from reference.plan_exact import plan_exact
from reference.route import route


def balance_same(topk_ids: Tensor, tables: ReplicaTables, **how: Any) -> tuple[Tensor, Tensor, ExactSplit]:
    """[T, K] slots, [R, E] loads of rank 0 alone, and the split; how: as of plan_exact."""
    loads = torch.zeros(tables.num_ranks, tables.num_experts, dtype=torch.int32)
    counted = count(topk_ids, tables.num_experts)
    loads[0] = counted.counts
    split = plan_exact(loads, tables, **how)
    return route(counted, split.quota, tables), loads, split
