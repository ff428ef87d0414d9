"""Policy ``exact_active``: fewest active slots on the busiest rank, for batches that read more than they compute."""

from __future__ import annotations

from dataclasses import dataclass

from isoload import ops
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, chosen_plan
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class ExactActivePolicy(Policy):
    """Every expert on one replica, such that no choice leaves the busiest rank fewer slots to read.

    In a small decode batch a rank waits for the weights of its active slots, not for its copies. Among the optima one
    with a low peak in copies is taken, whatever the ranks' speeds. Peak and bound of the plan are those of ``exact``'s
    measure; telemetry ends with the number of experts moved for the peak. :func:`isoload.ops.plan_active` also returns
    the proved number of slots.
    """

    name = "exact_active"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        active = ops.plan_active(demand.loads, placed.tables)
        return chosen_plan(self, active.quota, demand, placed, active.telemetry)
