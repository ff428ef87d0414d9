"""Policy ``none``: every expert is computed in its home slot; what an engine does without replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isoload.placement import PlacedLayers
from isoload.policies.base import Policy, Split, chosen_split, sum_sources
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class NonePolicy(Policy):
    """All copies of an expert go to its home slot."""

    name = "none"

    def split(self, loads: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        copies = sum_sources(loads, placed)
        quota = torch.zeros_like(placed.slot_to_expert).scatter_(-1, placed.home_slot.long(), copies)
        return chosen_split(quota, loads, tables, placed)
