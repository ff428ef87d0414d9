"""Policy ``lp``: the linear program of LPLB (papers/001) by an interior point method, rounded to whole copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from isoload import ops
from isoload.checks import check_range
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.base import Demand, Policy, chosen_plan
from isoload.policies.plan import Plan

Precision = Literal["float32", "float64"]


def refuse_speeds(policy: str, placement: Placement) -> None:
    """Raise ValueError if the placement's topology has speeds."""
    if placement.topology.speeds is not None:
        raise ValueError(f"speeds must be None for policy {policy}, which counts copies: use policy exact")


@dataclass(frozen=True)
class LpPolicy(Policy):
    """The real-valued optimum, rounded to whole copies: within one copy per replica of the least peak.

    ``exact`` finds the least peak itself and is faster; ``lp`` cross-checks it and provides real-valued splits. Speeds
    are not supported. Telemetry: iterations, status (0 converged, 1 iteration limit reached, 2 numerical breakdown:
    the split is even), 0, 0.

    Options: precision ("float32" or "float64"), tolerance (relative; None = what the precision allows) and iterations
    (0..1000; None = what the precision may need).
    """

    name = "lp"
    removed: ClassVar[Mapping[str, str]] = {
        "method": "use policy lp_sampled, which has the split of method affine"
    }
    precision: Precision = "float32"
    tolerance: float | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("tolerance", self.tolerance, 0, 1, " (relative)")
        check_range("iterations", self.iterations, 0, 1000)

    def check(self, placement: Placement) -> None:
        refuse_speeds(self.name, placement)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return rounded_plan(self, self.relax(demand, placed), demand, placed)

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        """Return the real-valued split."""
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        return ops.plan_lp(
            demand.loads,
            placed.tables,
            base=None if demand.local_shared is None else demand.local_shared.to(dtype),
            dtype=dtype,
            tolerance=self.tolerance,
            iterations=self.iterations,
        )


def rounded_plan(policy: Policy, relaxed: ops.LpSplit, demand: Demand, placed: PlacedLayers) -> Plan:
    """Return the plan of a real-valued split, rounded to whole copies."""
    quota = ops.round_split(relaxed.split, demand.loads, placed.tables)
    return chosen_plan(policy, quota, demand, placed, telemetry(relaxed))


def telemetry(relaxed: ops.LpSplit) -> torch.Tensor:
    """Return [..., 4] int32: iterations, status, 0, 0."""
    zero = torch.zeros_like(relaxed.status)
    return torch.stack([relaxed.iterations, relaxed.status, zero, zero], dim=-1)
