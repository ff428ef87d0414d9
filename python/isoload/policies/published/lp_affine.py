"""Policy ``lp_affine``: SGLang's own solver of the linear program, rounded to whole copies, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from isoload import ops
from isoload.placement.placed_layers import HostPlacement, PlacedLayers
from isoload.policies.base import Demand, Policy, sum_sources
from isoload.policies.lp import refuse_speeds, rounded_plan
from isoload.policies.plan import Plan
from isoload.policies.published.affine_scaling import plan_affine


@dataclass(frozen=True)
class LpAffinePolicy(Policy):
    """The split after some steps of affine scaling (``affine_scaling.py``), rounded; on the CPU, without speeds.

    Telemetry: iterations, status (0 accepted, 2 not accepted: the split is even), 0, 0.

    Options: iterations (0..1000).
    """

    name = "lp_affine"
    cpu_only = True
    iterations: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.iterations <= 1000:
            raise ValueError(f"iterations must be in 0..1000, got {self.iterations}")

    def check(self, placement: HostPlacement) -> None:
        refuse_speeds(self.name, placement)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return rounded_plan(self, self.relax(demand, placed), demand, placed)

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        """The real-valued split."""
        loads, ranks = sum_sources(demand.loads, placed), placed.topology.num_ranks
        return plan_affine(loads, placed.slot_to_expert, ranks, demand.at_home, self.iterations)
