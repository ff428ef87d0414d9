"""Policy ``dynamic``: SGLang's random replica."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Seeded, sampled_plan
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class DynamicPolicy(Seeded):
    """Each copy draws one of its expert's replicas at random, all equally likely (SGLang ``dynamic``).

    Options: seed, and step (the batch's number), which together with layer and rank select the random stream.
    """

    name = "dynamic"
    samples = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return sampled_plan(self, placed.tables.is_replica().to(torch.float32), demand, placed)
