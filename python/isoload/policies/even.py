"""Policy ``even``: equal parts for all replicas."""

from __future__ import annotations

from dataclasses import dataclass

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import EVEN, Demand, Policy, exact_plan
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class EvenPolicy(Policy):
    """Every replica takes load / replicas copies, the remainder in turn."""

    name = "even"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return exact_plan(self, demand, placed, **EVEN)
