"""Targets: what a source takes ranks to carry already, from the counts of all sources in the last batches."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload import ops
from isoload.replica_tables import ReplicaTables
from isoload.results import ONE_OFFSET
from isoload.topology import Topology

MOST = 2**29  # copies of a layer over all ranks as the split of targets takes them; more are scaled down


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
    source: int,
    tables: ReplicaTables,
    slot_to_expert: Tensor,
    topology: Topology,
    fixed: Tensor | None = None,
    price: Tensor | None = None,
) -> Tensor:
    """What one source takes ranks to carry already, [L, R] int32, for :func:`isoload.ops.plan_own`.

    With T_s[r] the copies that source s sends to rank r in the exact split of all N sources' recent counts, its offset
    is ``sum_t T_t[r] / N - T_s[r]``, in parts of its own copies and from the least rank on. The 1 / N matters: if each
    source made up for the whole of what the others leave, all would, and their loads would swing.

    Args:
        recent: [L, N, E] int64 decayed counts of every source, a rank or a node.
        source: s.
        tables: of the same L layers.
        slot_to_expert: [L, P].
        topology: R ranks, with their speeds.
        fixed: [L, N, R] int64 decayed copies that every source sends to ranks besides; None = none.
        price: [L, R] int64 in 2^-20 of the mean load, see :func:`new_price`; None = 0.
    """
    if fixed is None:
        fixed = recent.new_zeros(*recent.shape[:2], tables.num_ranks)
    recent, fixed = scaled(recent, fixed)
    loads, quota = recent.sum(1), exact_quota(recent, fixed, tables, topology)
    expert = slot_to_expert.long().clamp(0, tables.num_experts - 1)  # of other slots any: their quota is 0
    own = recent.select(1, source).gather(1, expert)
    sent = own * quota // loads.gather(1, expert).clamp(min=1)
    wanted = rank_copies(quota, tables) + fixed.sum(1)
    mine = rank_copies(sent, tables) + fixed.select(1, source)
    num_sources = recent.shape[1]
    gap = wanted - num_sources * mine
    gap = gap - gap.amin(1, keepdim=True)
    parts = gap * ONE_OFFSET // (num_sources * mine.sum(1, keepdim=True)).clamp(min=1)
    if price is not None:
        parts = parts + (price - price.amin(1, keepdim=True)) // tables.num_ranks
    return parts.clamp(max=ONE_OFFSET).to(torch.int32)


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
