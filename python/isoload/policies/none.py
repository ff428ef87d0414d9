"""Policy ``none``: every expert is computed in its home slot; what an engine does without replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.placed_layers import Filled
from isoload.policies.base import Demand, Policy, chosen_plan, sum_sources
from isoload.records import Plan


@dataclass(frozen=True)
class NonePolicy(Policy):
    """All copies of an expert go to its home slot."""

    name = "none"

    def split(self, demand: Demand, filled: Filled) -> Plan:
        copies = sum_sources(demand.loads, filled.placed)
        home = filled.placed.home_slot.narrow(-1, 0, filled.tables.num_experts).long()
        quota = torch.zeros_like(filled.slot_to_expert).scatter_(-1, home, copies)
        return chosen_plan(self, quota, demand, filled)
