"""Policies ``lp`` and ``lp_sampled``: the linear program of LPLB (papers/001) by interior point, rounded or drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from isoload import ops
from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Policy, Split, chosen_split, even_split
from isoload.replica_tables import ReplicaTables
from isoload.topology import NOMINAL_TICKS

Precision = Literal["float32", "float64"]


@dataclass(frozen=True)
class LpPolicy(Policy):
    """The real-valued optimum, rounded to whole copies: within one copy per replica of the least peak.

    ``exact`` finds the least peak itself and is faster; this one cross-checks it and serves real-valued wishes.
    Telemetry: iterations, status (0 converged, 1 not within the iterations, 2 broke down: the split is even), 0, 0.

    Options: precision ("float32" or "float64") and tolerance (relative; None = what the precision allows).
    """

    name = "lp"
    precision: Precision = "float32"
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"precision must be float32 or float64, got {self.precision!r}")

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        relaxed = self.relax(demand, tables, placed)
        quota = ops.round_split(relaxed.split, demand.loads, tables)
        return chosen_split(quota, demand, tables, placed)._replace(telemetry=telemetry(relaxed))

    def relax(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> ops.LpSplit:
        """The real-valued split."""
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        ticks = placed.topology.ticks_on(demand.loads.device)
        return ops.plan_lp(
            demand.loads,
            tables,
            speeds=None if ticks is None else NOMINAL_TICKS / ticks.to(dtype),
            base=None if demand.at_home is None else demand.at_home.to(dtype),
            dtype=dtype,
            tolerance=self.tolerance,
        )


def telemetry(relaxed: ops.LpSplit) -> torch.Tensor:
    """[..., 4] int32: iterations, status, 0, 0."""
    zero = torch.zeros_like(relaxed.status)
    return torch.stack([relaxed.iterations, relaxed.status, zero, zero], dim=-1)


@dataclass(frozen=True)
class LpSampledPolicy(LpPolicy):
    """Each copy draws its replica with the real-valued split's probabilities: the published LPLB, but its solver.

    Options: as ``lp``; seed and step (the batch's number), which together with layer and rank select the random
    stream.
    """

    name = "lp_sampled"
    seed: int = 0
    step: int = 0

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        relaxed = self.relax(demand, tables, placed)
        bound = even_split(demand, tables, placed).bound
        return Split(None, None, bound, telemetry(relaxed), relaxed.split.to(torch.float32))
