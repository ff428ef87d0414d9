"""Published forms of policies that only the benches run: draws of GRACE-MoE, and SGLang's linear program, rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from isoload import ops
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies import POLICIES, register_policy
from isoload.policies.base import Demand, Seeded, sampled_plan, sum_sources
from isoload.policies.exact import LpPolicy
from isoload.policies.grace import wished_parts
from isoload.policies.plan import Plan
from isoload.policies.published import plan_affine


@dataclass(frozen=True)
class GraceSampledPolicy(Seeded):
    """Each copy draws a replica on its own rank, else on its node, else any, by weights (GRACE-MoE, Algorithm 5).

    Weights as in policy ``grace``. The plan's are those over all replicas; :meth:`weights_of` has a rank's own.

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


@dataclass(frozen=True)
class LpAffinePolicy(LpPolicy):
    """The split of SGLang's own solver, rounded to whole copies; on the CPU, without speeds.

    Telemetry: iterations, status (0 accepted, 2 not accepted: the split is even), 0, 0.
    """

    name = "lp_affine"

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        loads, ranks = sum_sources(demand.loads, placed), placed.topology.num_ranks
        steps = 5 if self.iterations is None else self.iterations
        return plan_affine(loads, placed.slot_to_expert, ranks, demand.local_shared, steps)


@contextmanager
def registered() -> Iterator[None]:
    """Within it, replays take these policies by their names."""
    policies = (GraceSampledPolicy, LpAffinePolicy)
    for policy in policies:
        register_policy(policy)
    try:
        yield
    finally:
        for policy in policies:
            del POLICIES[policy.name]
