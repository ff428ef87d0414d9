"""Policies for bench_balance: the published five-step affine scaling (rivals.py), rounded and as it draws.

Our re-implementation, so labelled: `affine5_sampled` is what SGLang's `lp` dispatch does with its solver's fractions,
every copy drawn on its own; `affine5` rounds the same fractions to quotas, which shows what the five steps cost alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.policies import Demand, Policy, register_policy
from isoload.policies.base import Seeded, chosen_plan, sampled_plan
from isoload.records import Plan
from lib.rivals import AffineScaling, split_problem


def affine_split(loads: Tensor, slot_to_expert: Tensor, num_ranks: int) -> Tensor:
    """[P] float64 copies per slot of one layer after five steps, from loads [E]."""
    slots, copies = slot_to_expert.numpy(), loads.numpy()
    split = np.where(slots >= 0, copies[np.maximum(slots, 0)], 0).astype(np.float64)
    problem = split_problem(slots, copies, num_ranks)
    if not len(problem.load) or not copies.any():
        return torch.from_numpy(split)
    size = len(slots) // num_ranks
    parts = AffineScaling.build(problem).solve()
    experts = np.flatnonzero(np.bincount(slots[slots >= 0], minlength=len(copies)) > 1)
    for part, index, rank in zip(parts, problem.expert, problem.rank, strict=True):
        here = slots[rank * size : (rank + 1) * size]
        split[rank * size + int(np.flatnonzero(here == experts[index])[0])] = part
    return torch.from_numpy(split)


@register_policy
@dataclass(frozen=True)
class Affine5(Policy):
    """Five steps, rounded to quotas by largest remainder."""

    name = "affine5"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        quota = ops.round_split(self.fractions(demand, placed), demand.loads, placed.tables)
        return chosen_plan(self, quota, demand, placed)

    def fractions(self, demand: Demand, placed: PlacedLayers) -> Tensor:
        """[..., P] float64."""
        loads = demand.loads if demand.loads.dim() == placed.home_slot.dim() else demand.loads.sum(-2)
        ranks = placed.topology.num_ranks
        if placed.layer is not None:
            return affine_split(loads, placed.slot_to_expert, ranks)
        return torch.stack(
            [affine_split(*pair, ranks) for pair in zip(loads, placed.slot_to_expert, strict=True)]
        )


@register_policy
@dataclass(frozen=True)
class Affine5Sampled(Seeded, Affine5):
    """Five steps, then a draw for every copy."""

    name = "affine5_sampled"
    samples = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        weights = self.fractions(demand, placed).to(torch.float32)
        return sampled_plan(self, weights, demand, placed)
