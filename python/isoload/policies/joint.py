"""Policy ``joint``: routed and shared experts decided together, moving as little as possible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from isoload.ops import Objective
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, exact_plan
from isoload.policies.exact import ExactPolicy
from isoload.policies.plan import Plan
from isoload.policies.shared import SharedPolicy, add_exactly, live_bound, total_shared


@dataclass(frozen=True)
class JointPolicy(SharedPolicy):
    """The least peak over all splits of replicated experts and all places of shared copies, with its certificate.

    Shared copies can go anywhere, so they bind only where all ranks do: an exact split that stops at the common
    level, then an exact fill, is optimal. Stopping there leaves the routed copies nearer to where they were.

    Options: tolerance, budget and objective as in ``exact``; a budget that ends the split early leaves
    ``peak > bound``.
    """

    name = "joint"
    routed: str = "exact"
    tolerance: float = 0.0
    budget: int | None = None
    objective: Objective = "spread"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._exact()
        if self.routed != "exact":
            raise ValueError(f"routed must be exact for policy joint, got {self.routed!r}")

    def _exact(self) -> ExactPolicy:
        return ExactPolicy(self.tolerance, self.budget, self.objective)

    def joined(self) -> dict[str, Any] | None:
        return self._exact().options if type(self) is JointPolicy else None

    def split_routed(self, demand: Demand, placed: PlacedLayers) -> Plan:
        exact, pour = self._exact(), total_shared(demand, placed)
        return exact_plan(exact, demand.routed, placed, pour=pour, **exact.options)

    def add_shared(self, made: Plan, demand: Demand) -> Plan:
        filled, shared = add_exactly(made, demand, "all")
        bound = torch.minimum(live_bound(made.bound, demand, made.placed), filled.peak)
        return replace(made, policy=self, peak=filled.peak, bound=bound, shared=shared)
