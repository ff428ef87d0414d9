"""ReplicaTables: the slots of every expert, one int32 buffer per layer (csrc/algorithms/replica_tables.h)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isoload.ops.library import call, op

FIELDS = (  # all int32, with the leading dimension of the data
    "header",  # [2] number of replicated experts, number of classes
    "offsets",  # [E+1] expert e's replicas are ``slots[offsets[e]:offsets[e+1]]``
    "slots",  # [P] replicas of every expert, ascending; unused entries are -1
    "ranks",  # [P] ``slots // S``; unused entries are -1
    "solo",  # [P] the expert whose only replica is slot p, else -1
    "split",  # [P] index into ``order`` of the replicated expert in slot p, else -1
    "order",  # [E] replicated experts, class by class; unused entries are -1
    "classes",  # [E+1] class k is ``order[classes[k]:classes[k+1]]``; its experts share no rank
)


@dataclass(frozen=True)
class ReplicaTables:
    """The slots of every expert, from :func:`isoload.ops.replica_tables`: FIELDS after one another in ``data [...,
    size]``.

    Of two slots of one expert on one rank only the lower counts. A *replicated* expert has replicas on several ranks.
    """

    data: Tensor
    num_ranks: int
    num_experts: int
    num_slots: int

    @staticmethod
    def size(num_experts: int, num_slots: int) -> int:
        """Return the length of one layer's buffer in int32."""
        return 2 + 3 * num_experts + 2 + 4 * num_slots

    def field(self, name: str) -> Tensor:
        if name not in FIELDS:
            raise ValueError(f"name must be one of {', '.join(FIELDS)}, got {name!r}")
        experts, slots, at = self.num_experts, self.num_slots, FIELDS.index(name)
        lengths = (2, experts + 1, slots, slots, slots, slots, experts, experts + 1)
        return self.data.narrow(-1, sum(lengths[:at]), lengths[at])

    def __getitem__(self, layer: int) -> ReplicaTables:
        return ReplicaTables(self.data.select(0, layer), self.num_ranks, self.num_experts, self.num_slots)

    def is_replica(self) -> Tensor:
        """Return [..., P] bool: slots that take copies (not empty, and the lowest of their expert on their rank)."""
        return torch.logical_or(self.field("solo") >= 0, self.field("split") >= 0)


_replica_tables = op("replica_tables")(lambda a: None)


def replica_tables(slot_to_expert: Tensor, num_ranks: int, num_experts: int) -> ReplicaTables:
    """Derive the tables that planners and routers read from a placement.

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
