"""Policy ``exact``: the integral optimum of LPLB's linear program (papers/001), with its certificate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from isoload import ops
from isoload.placement import PlacedLayers
from isoload.policies.base import Policy, Split
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class ExactPolicy(Policy):
    """The least possible peak over all integer quotas.

    Options: tolerance (relative; 0 = exact, ``peak == bound``), budget (most augmentations; None = no limit).
    """

    name = "exact"
    tolerance: float = 0.0
    budget: int | None = None

    def split(self, loads: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        ticks = placed.topology.ticks_on(loads.device)
        return Split(*ops.plan_exact(loads, tables, None, self.tolerance, self.budget, ticks=ticks))
