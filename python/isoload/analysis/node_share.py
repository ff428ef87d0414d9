"""Shares of one node's ranks if every node splits its own loads: rows of ops.share, without the other nodes."""

from __future__ import annotations

import torch
from torch import Tensor


def share_of_node(loads: Tensor, quota: Tensor, slot_to_expert: Tensor, node: slice) -> Tensor:
    """Return [L, n, P] copies that the n ranks of a node send to each slot, as in :func:`isoload.ops.share`.

    The op returns the rows of all ranks, and those of other nodes would be 0: for 40 nodes 40 times the work.

    Args:
        loads: [L, n, E] int32 copies of the node's ranks.
        quota: [L, P] int32 copies that each slot takes of them; 0 for a slot without an expert.
        slot_to_expert: [L, P].
        node: the slots of the node's ranks, in order.
    """
    left, capacity, experts = loads.clone(), quota.clone(), slot_to_expert.long().clamp(min=0)
    inside = experts[:, node]
    own_experts = inside.view(*loads.shape[:2], -1)  # [L, n, S]
    local = torch.minimum(left.gather(2, own_experts), capacity[:, node].view_as(own_experts))
    left.scatter_add_(2, own_experts, -local)
    capacity[:, node] -= local.flatten(1)
    near = _dealt(left, capacity[:, node], inside)
    left.scatter_add_(2, inside.unsqueeze(1).expand(near.shape), -near)
    capacity[:, node] -= near.sum(1, dtype=torch.int32)
    sent = _dealt(left, capacity, experts)
    sent[:, :, node] += near
    for rank, of_rank in enumerate(local.unbind(1)):
        start = node.start + rank * local.shape[2]
        sent[:, rank, start : start + local.shape[2]] += of_rank
    return sent


def _dealt(left: Tensor, capacity: Tensor, experts: Tensor) -> Tensor:
    """Return [L, n, P] copies: sources fill an expert's slots, both in ascending order, until either is used up.

    Args:
        left: [L, n, E] copies that each source has.
        capacity: [L, P] that each slot takes. experts: [L, P] of the slots.
    """
    by_expert, order = experts.sort(dim=1, stable=True)
    ends = capacity.gather(1, order).cumsum(1)  # on one line for all experts
    starts = ends - capacity.gather(1, order)
    first = torch.searchsorted(by_expert, by_expert)  # of the expert's slots
    begin = starts.gather(1, first)
    slots = torch.empty_like(starts).scatter_(1, order, starts - begin).int().unsqueeze(1)
    slot_ends = slots + capacity.unsqueeze(1)
    source_ends = left.cumsum(1, dtype=torch.int32)
    at = experts.unsqueeze(1).expand(-1, left.shape[1], -1)
    high = torch.minimum(source_ends.gather(2, at), slot_ends)
    return (high - torch.maximum((source_ends - left).gather(2, at), slots)).clamp_(min=0)
