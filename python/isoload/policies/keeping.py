"""Copies that stay on their own rank, beneath the split of the others by any policy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isoload.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, even_split
from isoload.policies.borrowing import BorrowPolicy
from isoload.records import Plan


def may_keep_local(policy: Policy) -> bool:
    """Whether copies can stay on their own rank beneath its split: not if it draws or fixes the share."""
    if isinstance(policy, BorrowPolicy) and type(policy).share is BorrowPolicy.share:
        policy = policy.splitter
    return not policy.samples and type(policy).share is Policy.share


def split_above_local(policy: Policy, demand: Demand, placed: PlacedLayers) -> Plan:
    """The split by a policy where copies whose expert has a slot on their own rank stay; loads [..., R, E].

    The default share sends them nowhere else. The plan's bound is of all quotas, those that keep fewer copies too: the
    one that costs nothing.
    """
    kept = local_copies(demand, placed)
    left = Demand(demand.loads - kept, demand.tokens, add(demand.at_home, kept.sum(-1, dtype=torch.int32)))
    made = policy.split(left, replace(placed, quota=None))
    assert made.quota is not None and made.peak is not None
    bound = torch.minimum(even_split(demand, placed).bound, made.peak)
    return replace(made, quota=made.quota + quota_of(kept, placed), bound=bound)


def local_copies(demand: Demand, placed: PlacedLayers) -> Tensor:
    """[..., R, E] int32 the copies whose expert has a slot on their own rank."""
    experts = held_experts(placed)
    held = experts.new_zeros(*experts.shape[:-1], placed.tables.num_experts + 1, dtype=torch.int32)
    held.scatter_(-1, experts, torch.ones_like(experts, dtype=torch.int32))
    return held.narrow(-1, 0, placed.tables.num_experts) * demand.loads


def quota_of(kept: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., P] int32 kept copies [..., R, E] in the slots of their experts on their ranks."""
    padded = torch.nn.functional.pad(kept, (0, 1))
    return torch.gather(padded, -1, held_experts(placed)).flatten(-2)


def held_experts(placed: PlacedLayers) -> Tensor:
    """[..., R, S] int64 the routed expert of each slot that takes copies, else E."""
    tables = placed.tables
    experts = torch.where(tables.is_replica(), placed.slot_to_expert, tables.num_experts).long()
    return experts.view(*experts.shape[:-1], tables.num_ranks, -1)


def add(copies: Tensor | None, more: Tensor) -> Tensor:
    return more if copies is None else copies + more
