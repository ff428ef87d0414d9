"""Copies that stay on their own rank, beneath the split of the others by any policy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, even_split
from isoload.policies.borrowing import BorrowPolicy
from isoload.policies.plan import Plan


def may_keep_local(policy: Policy) -> bool:
    """Whether copies can stay on their own rank beneath its split: not if it draws or fixes the share."""
    if isinstance(policy, BorrowPolicy) and type(policy).share is BorrowPolicy.share:
        policy = policy.splitter
    return not policy.samples and type(policy).share is Policy.share


def held_experts(placed: PlacedLayers) -> Tensor:
    """[..., R, E] int32: 1 where a rank has a slot that takes copies of the expert, else 0."""
    experts = _experts_of_slots(placed)
    held = experts.new_zeros(*experts.shape[:-1], placed.tables.num_experts + 1, dtype=torch.int32)
    held.scatter_(-1, experts, torch.ones_like(experts, dtype=torch.int32))
    return held.narrow(-1, 0, placed.tables.num_experts)


def _experts_of_slots(placed: PlacedLayers) -> Tensor:
    """[..., R, S] int64 what each slot that takes copies holds; E = nothing."""
    tables = placed.tables
    experts = torch.where(tables.is_replica(), placed.slot_to_expert, tables.num_experts).long()
    return experts.view(*experts.shape[:-1], tables.num_ranks, -1)


def split_above_local(policy: Policy, demand: Demand, placed: PlacedLayers) -> Plan:
    """The split by a policy where copies whose expert has a slot on their own rank stay; loads [..., R, E].

    The default share sends them nowhere else. The plan's bound is of all quotas, those that keep fewer copies too: the
    one that costs nothing.
    """
    kept = held_experts(placed) * demand.loads  # [..., R, E]
    stay = kept.sum(-1, dtype=torch.int32)
    besides = stay if demand.at_home is None else demand.at_home + stay
    made = policy.split(Demand(demand.loads - kept, demand.tokens, besides), replace(placed, quota=None))
    assert made.quota is not None and made.peak is not None
    local = torch.nn.functional.pad(kept, (0, 1)).gather(-1, _experts_of_slots(placed))
    quota = made.quota + local.flatten(-2)
    bound = torch.minimum(even_split(demand, placed).bound, made.peak)
    return replace(made, quota=quota, bound=bound)
