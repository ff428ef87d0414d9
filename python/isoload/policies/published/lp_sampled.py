"""Policy ``lp_sampled``: replicas drawn with the linear program's probabilities, as LPLB is published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from isoload import ops
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Seeded, sampled_plan
from isoload.policies.lp import LpPolicy, telemetry
from isoload.policies.plan import Plan
from isoload.policies.published.lp_affine import LpAffinePolicy

Method = Literal["interior", "affine"]


@dataclass(frozen=True)
class LpSampledPolicy(Seeded, LpPolicy):
    """Each copy draws its replica with the real-valued split's probabilities: the published LPLB, but its solver.

    Options: as ``lp``; method: "interior", or "affine", which is the published solver (as ``lp_affine``; without
    precision or tolerance); seed and step (the batch's number), which together with layer and rank select the random
    stream.
    """

    name = "lp_sampled"
    samples = True
    removed: ClassVar[Mapping[str, str]] = {}
    method: Method = "interior"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "affine" and (self.precision, self.tolerance) != ("float32", None):
            raise ValueError(
                "precision and tolerance must be left out with method affine, "
                f"got {self.precision} and {self.tolerance}"
            )

    @property
    def cpu_only(self) -> bool:
        return self.method == "affine"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        relaxed = self.relax(demand, placed)
        return sampled_plan(self, relaxed.split.to(torch.float32), demand, placed, telemetry(relaxed))

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        """The real-valued split."""
        if self.method == "interior":
            return super().relax(demand, placed)
        steps = {} if self.iterations is None else {"iterations": self.iterations}
        return LpAffinePolicy(**steps).relax(demand, placed)
