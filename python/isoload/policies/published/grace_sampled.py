"""Policy ``grace_sampled``: the nearest replicas, drawn by the placement's weights, as GRACE-MoE is published."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.base import Demand, Seeded, sampled_plan
from isoload.policies.grace import wished_parts
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class GraceSampledPolicy(Seeded):
    """Each copy draws a replica on its own rank, else on its node, else any, by weights (GRACE-MoE, Algorithm 5).

    Weights as in ``grace``. The plan's are those over all replicas; :meth:`weights_of` has a rank's own. Draws need no
    loads, and do not use spare slots that another policy filled.

    Options: seed and step (the batch's number), which together with layer and rank select the random stream;
    locality=False draws among all replicas (Algorithm 4 alone).
    """

    name = "grace_sampled"
    samples = True
    locality: bool = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        anywhere = parts_by_rank(placed, False).select(-2, 0)  # the same for all ranks
        return sampled_plan(self, anywhere, demand, placed)

    def weights_of(self, plan: Plan, rank: int) -> Tensor:
        return parts_by_rank(plan.placed, self.locality).select(-2, rank)


def parts_by_rank(placed: PlacedLayers, locality: bool) -> Tensor:
    """[..., R, P] float32 wished part of every slot in a source rank's copies of its expert; 0 = not used."""
    # Not by the policy, whose step changes with every batch.
    return placed.memo(("grace_sampled", locality), partial(drawn_parts, locality=locality))


def drawn_parts(host: Placement, layer: int, locality: bool) -> np.ndarray[Any, Any]:
    parts = np.zeros((host.topology.num_ranks, host.num_slots), dtype=np.float32)
    for slots, wished in wished_parts(host, layer, locality):
        parts[:, slots] = wished
    return parts
