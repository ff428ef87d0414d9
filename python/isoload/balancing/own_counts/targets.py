"""Targets: what a source takes ranks to carry already, from the counts of all sources in the last batches."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload import ops
from isoload.ops.results import ONE_OFFSET, RECENT_LOSS
from isoload.ops.tables import ReplicaTables
from isoload.topology import Topology

MOST = 2**29  # copies of a layer over all ranks as the split of targets takes them; more are scaled down
FRACTION = 2**30


def scaled(recent: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [L, N, E] and fixed copies [L, N, R] in units in which a layer has at most MOST."""
    unit = (recent.sum((1, 2)) + fixed.sum((1, 2)))[:, None, None] // MOST + 1
    return recent // unit, fixed // unit


def exact_quota(recent: Tensor, fixed: Tensor, tables: ReplicaTables, topology: Topology) -> Tensor:
    """[L, P] int64 exact split of all sources' counts [L, N, E], above their fixed copies [L, N, R]."""
    besides = fixed.sum(1).to(torch.int32)
    loads = recent.sum(1).to(torch.int32)
    return ops.plan_exact(loads, tables, besides, ticks=topology.ticks_on(recent.device)).quota.long()


def rank_copies(per_slot: Tensor, tables: ReplicaTables) -> Tensor:
    """[L, R] of copies [L, P]."""
    return per_slot.view(len(per_slot), tables.num_ranks, -1).sum(-1)


def offsets(
    recent: Tensor,
    last: Tensor,
    source: int,
    tables: ReplicaTables,
    slot_to_expert: Tensor,
    topology: Topology,
    fixed: Tensor | None = None,
    price: Tensor | None = None,
) -> Tensor:
    """Return what one source takes ranks to carry already, [L, R] int32, for :func:`isoload.ops.plan_own`.

    T_s[r] is the number of copies that source s sends to rank r in the exact split of all N sources' recent counts,
    T[r] the sum over the sources, and ``|T|`` a sum over ranks. The offset is ``T[r] / |T| - T_s[r] / |T_s|``, less its
    minimum over the ranks, in parts of the source's own copies, times :func:`strength`. Each source makes up for its
    own share of the load only: if each made up for all that the others leave, the loads would swing.

    Args:
        recent: [L, N, E] int64 decayed counts of every source, a rank or a node.
        last: [L, N] int64 copies that every source sent in its last batch.
        source: s.
        tables: of the same L layers.
        slot_to_expert: [L, P].
        topology: R ranks, with their speeds.
        fixed: [L, N, R] int64 decayed copies that every source sends to ranks besides; None = none.
        price: [L, R] int64 in 2^-20 of the mean load, see :func:`new_price`; None = 0.
    """
    if fixed is None:
        fixed = recent.new_zeros(*recent.shape[:2], tables.num_ranks)
    weight = strength(recent.sum(2) + fixed.sum(2), last, source)
    recent, fixed = scaled(recent, fixed)
    loads, quota = recent.sum(1), exact_quota(recent, fixed, tables, topology)
    expert = slot_to_expert.long().clamp(0, tables.num_experts - 1)  # of other slots any: their quota is 0
    own, stays = recent.select(1, source), fixed.select(1, source)
    copies = own.sum(1, keepdim=True) + stays.sum(1, keepdim=True)
    # Fractions of the source's copies before the split, else those of few copies would be rounded away.
    sent = fractions(own, copies).gather(1, expert) * quota // loads.gather(1, expert).clamp(min=1)
    mine = rank_copies(sent, tables) + fractions(stays, copies)
    wanted = rank_copies(quota, tables) + fixed.sum(1)
    gap = fractions(wanted, wanted.sum(1, keepdim=True)) - mine
    gap = gap - gap.amin(1, keepdim=True)
    if price is not None:
        dear = (price - price.amin(1, keepdim=True)) // tables.num_ranks
        gap = gap + dear.clamp(max=ONE_OFFSET) * (FRACTION // ONE_OFFSET)
    return (gap * weight.unsqueeze(1) // FRACTION).clamp(max=ONE_OFFSET).to(torch.int32)


def fractions(copies: Tensor, total: Tensor) -> Tensor:
    """Copies in 2^-30 of their total, which is at most MOST; all 0 where the total is."""
    return copies * FRACTION // total.clamp(min=1)


def strength(recent: Tensor, last: Tensor, source: int) -> Tensor:
    """Return how far a source follows its targets, [L] int64 in 2^-20: fully where the load is as the targets take it.

    a_t is source t's share of the recent load, and b_t its share of the last batch, or of a mean batch where that is
    larger. The strength is the product of two factors, both continuous in the counts:

    - ``(1 - sum_t |a_t - b_t|) ** 2``, at least 0. Targets hold where the sources send at the same time. Where ranks
      are busy by turns, the copies that a target counts on do not come.
    - ``N * min(a_s, b_s)``, at most 1. The other sources make up for so much of this source's load. An idle source has
      no targets.

    Args:
        recent: [L, N] int64 decayed sums of every source's copies, in 2^-16.
        last: [L, N] int64 copies that every source sent in its last batch.
        source: s.
    """
    last = last * (2**32 // RECENT_LOSS)  # what as many copies in every batch would have added up to
    most = torch.maximum(recent.sum(1), last.sum(1)).unsqueeze(1)

    def shares(copies: Tensor, total: Tensor) -> Tensor:
        unit = total // MOST + 1
        return copies // unit * ONE_OFFSET // (total // unit).clamp(min=1)

    usual, present = shares(recent, recent.sum(1, keepdim=True)), shares(last, most)
    alike = (ONE_OFFSET - (usual - present).abs().sum(1)).clamp(min=0)
    warranted = recent.shape[1] * torch.minimum(usual, present).select(1, source)
    return alike * alike // ONE_OFFSET * warranted.clamp(max=ONE_OFFSET) // ONE_OFFSET


def new_price(price: Tensor, got: Tensor, wanted: Tensor) -> Tensor:
    """[L, R] int64 what a copy to each rank costs every source besides: more where more comes than targets want.

    ``p = 0.9 p + 0.3 (got - wanted) / mean load``, in 2^-20, of decayed sums: it wins back what is lost where few
    copies do not meet their targets alike on all ranks.

    Args:
        price: [L, R] of the exchange before.
        got: [L, R] int64 decayed copies that came to every rank.
        wanted: [L, R] int64 copies that the targets of the exchange before add up to, in any unit; 0 = no targets.
    """

    def part(copies: Tensor) -> Tensor:  # of the mean load
        copies = copies // (copies.sum(1, keepdim=True) // MOST + 1)
        return copies * (copies.shape[1] * ONE_OFFSET) // copies.sum(1, keepdim=True).clamp(min=1)

    known = ((got.sum(1) > 0) & (wanted.sum(1) > 0)).unsqueeze(1)
    return torch.where(known, (9 * price + 3 * (part(got) - part(wanted))) // 10, price)
