"""replica_tables: who holds what, derived from a placement; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, op
from isoload.ops.tables import ReplicaTables

_replica_tables = op("replica_tables", lambda a: None)


def replica_tables(slot_to_expert: Tensor, num_ranks: int, num_experts: int) -> ReplicaTables:
    """Derives the tables that planners and routers read from a placement.

    Args:
        slot_to_expert: [P] or [L, P] int32; -1 = empty. Ids outside -1..E-1 behave as -1.
        num_ranks: R, divides P.
        num_experts: E.
    """
    if slot_to_expert.dim() not in (1, 2):
        raise ValueError(f"slot_to_expert must be [P] or [L, P], got {list(slot_to_expert.shape)}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    slots = slot_to_expert.shape[-1]
    size = ReplicaTables.size(num_experts, slots)
    data = slot_to_expert.new_empty((*slot_to_expert.shape[:-1], size), dtype=torch.int32)
    call(_replica_tables, slot_to_expert, num_ranks, num_experts, data)
    return ReplicaTables(data, num_ranks, num_experts, slots)
