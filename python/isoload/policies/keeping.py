"""Copies that stay on their own rank, beneath the split of the others by any policy."""

from __future__ import annotations

from dataclasses import replace

import torch

from isoload.policies.base import Demand, Policy, even_split
from isoload.policies.borrowing import BorrowPolicy
from isoload.records.placed_layers import PlacedLayers
from isoload.records.plan import Plan


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
    tables = placed.tables
    here = torch.where(tables.is_replica(), placed.slot_to_expert, tables.num_experts).long()
    # [..., R, S] what each slot that takes copies holds
    here = here.view(*here.shape[:-1], tables.num_ranks, -1)
    held = here.new_zeros(*here.shape[:-1], tables.num_experts + 1, dtype=torch.int32)
    held.scatter_(-1, here, torch.ones_like(here, dtype=torch.int32))
    kept = held.narrow(-1, 0, tables.num_experts) * demand.loads  # [..., R, E]
    stay = kept.sum(-1, dtype=torch.int32)
    besides = stay if demand.at_home is None else demand.at_home + stay
    made = policy.split(Demand(demand.loads - kept, demand.tokens, besides), replace(placed, quota=None))
    assert made.quota is not None and made.peak is not None
    quota = made.quota + torch.nn.functional.pad(kept, (0, 1)).gather(-1, here).flatten(-2)
    bound = torch.minimum(even_split(demand, placed).bound, made.peak)
    return replace(made, quota=quota, bound=bound)
