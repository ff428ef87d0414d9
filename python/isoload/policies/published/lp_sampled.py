"""Policy ``lp_sampled``: replicas drawn with the linear program's probabilities, as LPLB is published."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.policies.base import Demand, Seeded, sampled_plan
from isoload.policies.lp import LpPolicy, telemetry
from isoload.records.placed_layers import PlacedLayers
from isoload.records.plan import Plan


@dataclass(frozen=True)
class LpSampledPolicy(Seeded, LpPolicy):
    """Each copy draws its replica with the real-valued split's probabilities: the published LPLB, but its solver.

    Options: as ``lp``; seed and step (the batch's number), which together with layer and rank select the random
    stream.
    """

    name = "lp_sampled"
    samples = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        relaxed = self.relax(demand, placed)
        return sampled_plan(self, relaxed.split.to(torch.float32), demand, placed, telemetry(relaxed))
