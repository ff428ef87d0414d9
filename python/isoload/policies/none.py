"""Policy ``none``: every expert is computed in its home slot; what an engine does without replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Policy, Split, chosen_split, sum_sources
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class NonePolicy(Policy):
    """All copies of an expert go to its home slot."""

    name = "none"

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        copies = sum_sources(demand.loads, placed)
        home = placed.home_slot.narrow(-1, 0, tables.num_experts).long()
        quota = torch.zeros_like(placed.slot_to_expert).scatter_(-1, home, copies)
        return chosen_split(quota, demand, tables, placed)
