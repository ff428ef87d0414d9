"""Policy ``none``: replicas unused. Every expert is computed in its home slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, chosen_plan, sum_sources
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class NonePolicy(Policy):
    """All copies of an expert go to its home slot."""

    name = "none"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        copies = sum_sources(demand.loads, placed)
        home = placed.home_slot.narrow(-1, 0, placed.tables.num_experts).long()
        quota = torch.zeros_like(placed.slot_to_expert).scatter_(-1, home, copies)
        return chosen_plan(self, quota, demand, placed)
