"""Targets: the load that a source assumes on every rank, from the counts of all sources in the last batches.

:func:`exchange` renews the targets of layers with loads="own" or "node". It is the only point at which all ranks wait
for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from isoload import ops
from isoload.balancing.own_counts import OwnCounts
from isoload.checks import capturing
from isoload.ops.results import ONE_OFFSET, RECENT_LOSS
from isoload.ops.tables import ReplicaTables
from isoload.placement.placement import check_same_shape
from isoload.policies.plan import rank_cost
from isoload.topology import Topology

if TYPE_CHECKING:
    from isoload.balancing.balancer import Balancer


MOST = 2**29  # copies of a layer that the split of targets accepts; larger counts are scaled down
FRACTION = 2**30


def scaled(recent: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Scale counts [L, N, E] and fixed copies [L, N, R] so that a layer has at most MOST copies."""
    unit = (recent.sum((1, 2)) + fixed.sum((1, 2)))[:, None, None] // MOST + 1
    return recent // unit, fixed // unit


def exact_quota(recent: Tensor, fixed: Tensor, tables: ReplicaTables, topology: Topology) -> Tensor:
    """Return the [L, P] int64 exact split of all sources' counts [L, N, E], above their fixed copies [L, N, R]."""
    besides = fixed.sum(1).to(torch.int32)
    loads = recent.sum(1).to(torch.int32)
    return ops.plan_exact(loads, tables, besides, ticks=topology.ticks_on(recent.device)).quota.long()


def rank_copies(per_slot: Tensor, tables: ReplicaTables) -> Tensor:
    return per_slot.view(len(per_slot), tables.num_ranks, -1).sum(-1)


def offsets(
    recent: Tensor,
    last: Tensor,
    source: int,
    tables: ReplicaTables,
    slot_to_expert: Tensor,
    topology: Topology,
    fixed: Tensor | None = None,
) -> Tensor:
    """Return the load that one source assumes on ranks, [L, R] int32, for :func:`isoload.ops.plan_own`.

    T_s[r] is the number of copies that source s sends to rank r in the exact split of all N sources' recent counts,
    T[r] the sum over the sources, and ``|T|`` a sum over ranks. The offset is ``T[r] / |T| - T_s[r] / |T_s|``, less its
    minimum over the ranks, as a fraction of the source's own copies, times :func:`strength`. Each source compensates
    only its own share of the load: if each compensated all of the imbalance, the loads would swing.

    `recent` [L, N, E] int64 are decayed counts of every source, last [L, N] int64 the copies of its last batch, and
    fixed [L, N, R] int64 decayed copies that do not depend on the split (shared experts).
    """
    if fixed is None:
        fixed = recent.new_zeros(*recent.shape[:2], tables.num_ranks)
    weight = strength(recent.sum(2) + fixed.sum(2), last, source)
    recent, fixed = scaled(recent, fixed)
    loads, quota = recent.sum(1), exact_quota(recent, fixed, tables, topology)
    expert = slot_to_expert.long().clamp(0, tables.num_experts - 1)  # other slots have quota 0
    source_recent, stays = recent.select(1, source), fixed.select(1, source)
    copies = source_recent.sum(1, keepdim=True) + stays.sum(1, keepdim=True)
    # Divide by the source's copies before the split: otherwise a source with few copies would be rounded away.
    sent = fractions(source_recent, copies).gather(1, expert) * quota // loads.gather(1, expert).clamp(min=1)
    mine = rank_copies(sent, tables) + fractions(stays, copies)
    wanted = rank_copies(quota, tables) + fixed.sum(1)
    gap = fractions(wanted, wanted.sum(1, keepdim=True)) - mine
    gap = gap - gap.amin(1, keepdim=True)
    return (gap * weight.unsqueeze(1) // FRACTION).clamp(max=ONE_OFFSET).to(torch.int32)


def fractions(copies: Tensor, total: Tensor) -> Tensor:
    """Return copies as multiples of 2^-30 of their total, which is at most MOST; all 0 where the total is 0."""
    return copies * FRACTION // total.clamp(min=1)


def strength(recent: Tensor, last: Tensor, source: int) -> Tensor:
    """Return how far a source follows its targets, [L] int64 in 2^-20; 2^20 where the load matches the targets' counts.

    a_t is source t's share of the recent load, recent [L, N] in 2^-16, and b_t its share of the last batch, last [L,
    N], or of a mean batch where that is larger. The strength is ``max(0, 1 - sum_t |a_t - b_t|) ** 2``, because the
    copies that a target counts on do not come where ranks are busy by turns, times ``min(1, N * min(a_s, b_s))``, the
    part of this source's load that the other sources compensate.
    """
    last = last * (2**32 // RECENT_LOSS)  # the decayed sum if every batch had as many copies
    larger = torch.maximum(recent.sum(1), last.sum(1)).unsqueeze(1)

    def shares(copies: Tensor, total: Tensor) -> Tensor:
        unit = total // MOST + 1
        return copies // unit * ONE_OFFSET // (total // unit).clamp(min=1)

    usual, present = shares(recent, recent.sum(1, keepdim=True)), shares(last, larger)
    alike = (ONE_OFFSET - (usual - present).abs().sum(1)).clamp(min=0)
    warranted = recent.shape[1] * torch.minimum(usual, present).select(1, source)
    return alike * alike // ONE_OFFSET * warranted.clamp(max=ONE_OFFSET) // ONE_OFFSET


class Exchanged(NamedTuple):
    """Result of an exchange, the same on all ranks.

    imbalance [L] float64: max/mean rank load of the copies that all sources sent in their last batches, planned or not;
    nan where no source sent a copy, or none since the last load of a placement. With ranks of different speeds a load
    is a cost, as in :class:`isoload.policies.plan.Plan`.
    """

    imbalance: Tensor


def exchange(balancers: Sequence[Balancer]) -> Exchanged:
    """Renew the targets of layers with loads="own" or "node", in one gather. All ranks call it.

    Call it every 16 batches or so, between steps and outside of CUDA graphs, on ranks without tokens too. The balancers
    are of one group and one shape of placement, in the same order on all ranks. ValueError is raised on all ranks, also
    for a batch that has failed since the last exchange.
    """
    group = balancers[0].group
    own_counts = filter(None, (balancer.own_counts for balancer in balancers))
    if any(capturing(counts.recent.device) for counts in own_counts):
        raise ValueError("exchange must be outside of a CUDA graph: it waits for the other ranks")
    with group.agreeing("exchange") as facts:
        owned = _checked(balancers)
        recent = torch.stack([counts.recent for counts in owned], 1)  # [n, L, E]
        sent = torch.stack([counts.sent for counts in owned], 1)  # [n, L, 3, R]
        placed = [balancer.placed_on(recent.device) for balancer in balancers]
        known = [{k: v for k, v in balancer.facts.items() if k != "batch number"} for balancer in balancers]
        facts["layers of exchange"] = known  # ranks without tokens run fewer batches
    first, topology = owned[0], placed[0].topology
    counts, of_ranks, last = _gather(first, recent, sent)
    fixed = of_ranks[:, :, 1]
    data = torch.stack([layer.tables.data for layer in placed])
    tables = replace(placed[0].tables, data=data)
    slots = torch.stack([layer.slot_to_expert for layer in placed])
    for i, source in enumerate(first.sources):
        renewed_offsets = offsets(counts, last.sum(2), source, tables, slots, topology, fixed)
        for counts_of_layer, offset in zip(owned, renewed_offsets, strict=True):
            counts_of_layer.offset[i].copy_(offset)
    return Exchanged(_imbalance(last.sum(1), topology))


def _checked(balancers: Sequence[Balancer]) -> list[OwnCounts]:
    owned = [balancer.own_counts for balancer in balancers if balancer.own_counts is not None]
    if len(owned) < len(balancers):
        raise ValueError("loads must be own or node where counts are exchanged, got gathered")
    for i, (balancer, counts) in enumerate(zip(balancers, owned, strict=True)):
        if balancer.group is not balancers[0].group:
            raise ValueError(
                f"balancers must share one group, but the balancer at position {i} has another group"
            )
        check_same_shape(balancers[0].placement, balancer.placement)
        if counts.loads != owned[0].loads:
            raise ValueError(f"balancers must have the same loads, got {owned[0].loads} and {counts.loads}")
    failures = [counts.failure for counts in owned]
    for counts in owned:
        counts.failure = None
    if failure := next(filter(None, failures), None):
        raise ValueError(f"a batch has failed since the last exchange: {failure}")
    return owned


def _gather(own_counts: OwnCounts, recent: Tensor, sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the counts of all N sources from those of the owned ones. Returns decayed counts [L, N, E] and copies [L,
    N, 2, R], and [L, N, R] copies of every source's last batch."""
    rows = torch.cat([recent.flatten(1), sent[:, :, :2].flatten(1), sent[:, :, 2].flatten(1)], 1)
    group, size = own_counts.group, own_counts.size
    gathered = group.gather(
        "exchange", [rows[own_counts.sources.index(rank // size)] for rank in group.ranks]
    )
    widths = [recent[0].numel(), sent[0, :, :2].numel(), sent[0, :, 2].numel()]
    counts, copies, last = gathered.view(-1, size, gathered.shape[1]).split(widths, 2)
    decayed = torch.cat([counts, copies], 2)
    if size > 1 and (unlike := (decayed != decayed[:, :1]).any(2)).any():
        rank = int(unlike.flatten().nonzero()[0])
        raise ValueError(
            f"recent counts of node {rank // size} must be the same on its ranks, got others on rank {rank}"
        )
    counts = counts[:, 0].reshape(-1, *recent.shape[1:])
    copies = copies[:, 0].reshape(len(counts), sent.shape[1], 2, -1)
    last = last.sum(1).reshape(len(counts), sent.shape[1], -1) // size
    return counts.transpose(0, 1), copies.transpose(0, 1), last.transpose(0, 1)


def _imbalance(copies: Tensor, topology: Topology) -> Tensor:
    cost = rank_cost(copies, topology)
    return cost.amax(1).double() * topology.copies_per_cost / copies.sum(1)  # 0 / 0 is nan
