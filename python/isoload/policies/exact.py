"""Policy ``exact``: the integral optimum of LPLB's linear program (papers/001), with its certificate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isoload import ops
from isoload.ops import Objective
from isoload.placed_layers import Filled
from isoload.policies.base import Demand, Needs, Policy
from isoload.records import Plan


@dataclass(frozen=True)
class ExactPolicy(Policy):
    """The least possible peak over all integer quotas.

    Options: tolerance (relative; 0 = exact, ``peak == bound``), budget (most augmentations; None = no limit),
    objective (which of the splits with this peak: "spread", "local" or "packed", see :func:`isoload.ops.plan_exact`).
    """

    name = "exact"
    tolerance: float = 0.0
    budget: int | None = None
    objective: Objective = "spread"

    @property
    def needs(self) -> Needs:
        return "per_source" if self.objective == "local" else "sum"

    def split(self, demand: Demand, filled: Filled) -> Plan:
        return self.split_above(demand.loads, filled, fixed=demand.at_home)

    def split_above(
        self, loads: Tensor, filled: Filled, fixed: Tensor | None = None, pour: Tensor | None = None
    ) -> Plan:
        """The split with copies that ranks carry besides [..., R], or that go to any rank afterwards [...]."""
        topology = filled.placed.topology
        exact = ops.plan_exact(
            loads,
            filled.tables,
            fixed,
            self.tolerance,
            self.budget,
            ticks=topology.ticks_on(loads.device),
            pour=pour,
            objective=self.objective,
            ranks_per_node=topology.ranks_per_node,
        )
        return Plan(filled, self, *exact)
