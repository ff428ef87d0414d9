"""Policy ``exact``: the integral optimum of LPLB's linear program (papers/001), with its certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from isoload import ops
from isoload.ops import Objective
from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Policy, Split
from isoload.replica_tables import ReplicaTables


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
    def needs(self) -> Literal["sum", "per_source"]:
        return "per_source" if self.objective == "local" else "sum"

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        return self.split_above(demand.loads, tables, placed, fixed=demand.at_home)

    def split_above(
        self,
        loads: Tensor,
        tables: ReplicaTables,
        placed: PlacedLayers,
        fixed: Tensor | None = None,
        pour: Tensor | None = None,
    ) -> Split:
        """The split with copies that ranks carry besides [..., R], or that go to any rank afterwards [...]."""
        exact = ops.plan_exact(
            loads,
            tables,
            fixed,
            self.tolerance,
            self.budget,
            ticks=placed.topology.ticks_on(loads.device),
            pour=pour,
            objective=self.objective,
            ranks_per_node=placed.topology.ranks_per_node,
        )
        return Split(*exact)
