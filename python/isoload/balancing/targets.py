"""exchange: renews the targets of layers whose sources plan by their own counts; for it alone all ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isoload.balancing.own_counts.counts import LastCounts, OwnCounts
from isoload.balancing.own_counts.targets import exact_quota, new_price, offsets, rank_copies, scaled
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement, check_same_shape
from isoload.policies.plan import rank_cost
from isoload.topology import Topology
from isoload.transport import Group
from isoload.value_checks import capturing


class Exchanged(NamedTuple):
    """What an exchange found out, the same on all ranks.

    imbalance [L] float64: max/mean rank load of the copies that all sources sent in their last batches, whether these
    were planned or not (``min_tokens``, a layer without replicas); nan where no source sent a copy, or none since the
    last load of a placement. With ranks of different speeds a load is a cost, as in
    :class:`isoload.policies.plan.Plan`.
    """

    imbalance: Tensor


class OwnLayer(Protocol):
    """What an exchange needs of a Balancer."""

    group: Group
    placement: Placement
    own_counts: OwnCounts | None

    @property
    def facts(self) -> dict[str, int]: ...
    def placed_on(self, device: torch.device) -> PlacedLayers: ...


def exchange(balancers: Sequence[OwnLayer]) -> Exchanged:
    """Renews the targets of layers with loads="own" or "node", the quotas of "last", in one gather. All ranks call it.

    Every 16 batches or so, outside of CUDA graphs, at a step's boundary; ranks without tokens, too. Until the next one
    no batch waits for another source.

    Args:
        balancers: of one group and one shape of placement, in the same order on all ranks.

    Raises:
        ValueError: on all ranks, naming the argument, the rule and the value, the layer or placement that differs, or
            the rank whose batch has failed since the exchange before.
        RuntimeError: naming the stage, where a rank is gone or does not come in the group's timeout.
    """
    group = balancers[0].group
    if any(of.own_counts is not None and capturing(of.own_counts.recent.device) for of in balancers):
        raise ValueError("exchange must be outside of a CUDA graph: it waits for the other ranks")
    with group.agreeing("exchange") as facts:
        owned = _checked(balancers)
        recent = torch.stack([of.recent for of in owned], 1)  # [n, L, E]
        sent = torch.stack([of.sent for of in owned], 1)  # [n, L, 3, R]
        placed = [of.placed_on(recent.device) for of in balancers]
        known = [{k: v for k, v in of.facts.items() if k != "batch number"} for of in balancers]
        facts["layers of exchange"] = known  # ranks may differ in batches: those without tokens run none
    first, topology = owned[0], placed[0].topology
    counts, of_ranks, last = _gather(first, recent, sent)
    fixed = of_ranks[:, :, 1]
    data = torch.stack([of.tables.data for of in placed])
    tables = replace(placed[0].tables, data=data)
    exchanged = Exchanged(_imbalance(last.sum(1), topology))
    if isinstance(first, LastCounts):
        for own, quota in zip(owned, exact_quota(*scaled(counts, fixed), tables, topology), strict=True):
            assert isinstance(own, LastCounts), "an exchange is of layers alike"
            own.quota.copy_(quota)
        return exchanged
    slots = torch.stack([of.slot_to_expert for of in placed])
    price = None
    if held := [of.price for of in owned if of.price is not None]:
        before, wanted = torch.stack(held, 1)
        price = new_price(before, of_ranks.sum((1, 2)), wanted)
        counts_of, fixed_of = scaled(counts, fixed)
        level = rank_copies(exact_quota(counts_of, fixed_of, tables, topology), tables) + fixed_of.sum(1)
        for kept, *renewed in zip(held, price, level, strict=True):
            kept.copy_(torch.stack(renewed))
    for i, source in enumerate(first.sources):
        renewed_offsets = offsets(counts, last.sum(2), source, tables, slots, topology, fixed, price)
        for of, offset in zip(owned, renewed_offsets, strict=True):
            of.offset[i].copy_(offset)
    return exchanged


def _checked(balancers: Sequence[OwnLayer]) -> list[OwnCounts]:
    """The layers' counts, if they can be exchanged together."""
    owned = [of.own_counts for of in balancers if of.own_counts is not None]
    if len(owned) < len(balancers):
        raise ValueError("loads must be own, node or last where counts are exchanged, got gathered")
    for i, (of, own) in enumerate(zip(balancers, owned, strict=True)):
        if of.group is not balancers[0].group:
            raise ValueError(f"balancers must be of one group, got another for the one at {i}")
        check_same_shape(balancers[0].placement, of.placement)
        kinds = [(kept.word, kept.price is not None) for kept in (owned[0], own)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"balancers must be alike in loads and price, got {kinds[0]} and {kinds[1]}")
    failures = [own.failure for own in owned]
    for own in owned:
        own.failure = None
    if failure := next(filter(None, failures), None):
        raise ValueError(f"a batch has failed since the exchange before: {failure}")
    return owned


def _gather(own: OwnCounts, recent: Tensor, sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the counts of all N sources from those of the owned ones.

    Returns:
        [L, N, E] decayed counts, [L, N, 2, R] decayed copies, [L, N, R] copies of every source's last batch.
    """
    rows = torch.cat([recent.flatten(1), sent[:, :, :2].flatten(1), sent[:, :, 2].flatten(1)], 1)
    group, size = own.group, own.size
    gathered = group.gather("exchange", [rows[own.sources.index(rank // size)] for rank in group.ranks])
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
    """[L] float64 max/mean rank load of copies [L, R]."""
    cost = rank_cost(copies, topology)
    return cost.amax(1).double() * topology.copies_per_cost / copies.sum(1)  # 0 / 0 is nan
