"""Policy ``lp``: the linear program of LPLB (papers/001) by interior point, or as published, rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from isoload import ops
from isoload.policies.base import Demand, Policy, chosen_plan, sum_sources
from isoload.policies.published.affine_scaling import plan_affine
from isoload.records.placed_layers import HostPlacement, PlacedLayers
from isoload.records.plan import Plan
from isoload.topology import NOMINAL_TICKS

Precision = Literal["float32", "float64"]
Method = Literal["interior", "affine"]


@dataclass(frozen=True)
class LpPolicy(Policy):
    """The real-valued optimum, rounded to whole copies: within one copy per replica of the least peak.

    ``exact`` finds the least peak itself and is faster; this one cross-checks it and serves real-valued wishes.
    Telemetry: iterations, status (0 converged, 1 not within the iterations, 2 broke down: the split is even), 0, 0.

    Options: precision ("float32" or "float64") and tolerance (relative; None = what the precision allows); method:
    "interior", or "affine", which is SGLang's own solver, to compare with (``published/affine_scaling.py``; in float32,
    without tolerance or speeds); iterations (0..1000; None = what the precision may need, of "affine" 5).
    """

    name = "lp"
    precision: Precision = "float32"
    tolerance: float | None = None
    method: Method = "interior"
    iterations: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance is not None and not 0 <= self.tolerance <= 1:
            raise ValueError(f"tolerance must be in 0..1 (relative), got {self.tolerance}")
        if self.iterations is not None and not 0 <= self.iterations <= 1000:
            raise ValueError(f"iterations must be in 0..1000, got {self.iterations}")
        if self.method == "affine" and (self.precision, self.tolerance) != ("float32", None):
            raise ValueError(
                "precision and tolerance must be left out with method affine, "
                f"got {self.precision} and {self.tolerance}"
            )

    @property
    def cpu_only(self) -> bool:
        return self.method == "affine"

    def check(self, placement: HostPlacement) -> None:
        if self.method == "affine" and placement.topology.speeds is not None:
            raise ValueError(
                f"speeds must be None for policy {self.name} with method affine, which counts copies"
            )

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        relaxed = self.relax(demand, placed)
        quota = ops.round_split(relaxed.split, demand.loads, placed.tables)
        return chosen_plan(self, quota, demand, placed, telemetry(relaxed))

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        """The real-valued split."""
        if self.method == "affine":
            loads, ranks = sum_sources(demand.loads, placed), placed.topology.num_ranks
            steps = 5 if self.iterations is None else self.iterations
            return plan_affine(loads, placed.slot_to_expert, ranks, demand.at_home, steps)
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        ticks = placed.ticks
        return ops.plan_lp(
            demand.loads,
            placed.tables,
            speeds=None if ticks is None else NOMINAL_TICKS / ticks.to(dtype),
            base=None if demand.at_home is None else demand.at_home.to(dtype),
            dtype=dtype,
            tolerance=self.tolerance,
            iterations=self.iterations,
        )


def telemetry(relaxed: ops.LpSplit) -> torch.Tensor:
    """[..., 4] int32: iterations, status, 0, 0."""
    zero = torch.zeros_like(relaxed.status)
    return torch.stack([relaxed.iterations, relaxed.status, zero, zero], dim=-1)
