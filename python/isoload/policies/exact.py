"""Policy ``exact``: the integral optimum of LPLB's linear program (papers/001), with its certificate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isoload import ops
from isoload.ops import Objective
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Needs, Policy, exact_plan
from isoload.policies.plan import Plan


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000 (relative), got {self.tolerance}")
        if self.budget is not None and not 0 <= self.budget < 2**31:
            raise ValueError(f"budget must be in 0..2^31-1, got {self.budget}")

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return "per_source" if self.objective == "local" else "sum"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        rank = demand.rank if type(self) is ExactPolicy else None  # another may split or share its own way
        return exact_plan(self, demand, placed, rank, **self.options)

    def balance_same(self, topk_ids: Tensor, placed: PlacedLayers) -> tuple[Tensor, Tensor, Plan]:
        """Slots [T, K] of rows that all ranks hold alike, their loads [R, E], and the plan; without shared experts."""
        per_node = placed.topology.ranks_per_node
        how: dict[str, Any] = {"ranks_per_node": per_node, "ticks": placed.ticks, **self.options}
        slots, loads, split = ops.balance_same(topk_ids, placed.tables, **how)
        return slots, loads, Plan(placed, self, split.quota, split.peak, split.bound, split.telemetry)

    @property
    def options(self) -> dict[str, Any]:
        """Of :func:`isoload.ops.plan_exact`."""
        return {"tolerance": self.tolerance, "budget": self.budget, "objective": self.objective}
