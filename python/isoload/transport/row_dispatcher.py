"""RowDispatcher sends a token once to every rank that has one of its slots, in one all-to-all.

NodeDispatcher sends a token once to every node that has one of its slots: to the *leader* there, the rank with this
rank's position, and from the leader to its node. Combine reverses both hops: one row per token leaves a node. GRACE-MoE
distributes tokens in this way (papers/002), as do DeepEP's kernels between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoload.checks import values_readable
from isoload.ops import number_rows, pack_rows
from isoload.ops.results import RowNumbers
from isoload.transport.dispatcher import (
    FACTS,
    Combine,
    Dispatch,
    Dispatcher,
    Received,
    RowMap,
    anchor,
    dispatch_facts,
    refuse_gradients,
    unpack_payload,
)
from isoload.transport.exchanges import Owned, PerRank
from isoload.transport.group import Call, Group

COUNTS_STAGE = "dispatch row counts"
Given = tuple[Owned, Owned, Owned]  # x, slots and weights of the owned ranks


@dataclass(frozen=True, eq=False)
class RowHandle:
    """State of a hop for combine: the rank's row map, the link in autograd, and the hop before it, if any."""

    row_map: RowMap
    link: Tensor
    before: RowHandle | None = None


class RowDispatcher(Dispatcher):
    """Rows arrive by source rank, then token. All ranks of the group construct it together, with the same capacities.

    Args:
        group: the ranks.
        max_tokens_per_rank: C. Every pair of ranks exchanges C rows, so shapes are fixed and the host never waits; the
            rows of source s start at s * C. None: only existing rows travel, and the host waits once per dispatch.
        max_copies_per_rank: with max_tokens_per_rank, the most copies that a rank receives, which sizes the experts'
            buffers. More copies raise ValueError on all ranks on CPU; on a GPU they are dropped and
            :func:`isoload.ops.check_device` raises.
    """

    num_counts = 2  # rows and copies to every rank

    def __init__(
        self, group: Group, max_tokens_per_rank: int | None = None, max_copies_per_rank: int | None = None
    ) -> None:
        limits = {"max_tokens_per_rank": max_tokens_per_rank, "max_copies_per_rank": max_copies_per_rank}
        with group.agreeing("construction") as facts:
            for name, value in limits.items():
                if value is not None and value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")
            if max_tokens_per_rank is None and max_copies_per_rank is not None:
                raise ValueError(
                    f"max_copies_per_rank needs max_tokens_per_rank, got {max_copies_per_rank} and None"
                )
            facts.update(limits)
        self.group = group
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_copies_per_rank = max_copies_per_rank
        self.host_waits = max_tokens_per_rank is None

    def dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        maps, payload, packed = self._pack((x, slots, weights), slots_per_rank, call)
        link, *values = Dispatch.apply(self.group, maps, payload, anchor(), *x, *weights)
        return self._receive(maps, link, values, slots_per_rank, packed)

    def start_dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> Callable[[], list[Received]]:
        """See :meth:`Dispatcher.start_dispatch`. The row counts are exchanged before it returns."""
        maps, payload, packed = self._pack((x, slots, weights), slots_per_rank, call, forward_only=True)
        finish = self.group.start_send("dispatch", payload, maps)

        def wait() -> list[Received]:
            values = [part for column in unpack_payload(finish(), x[0], weights[0]) for part in column]
            return self._receive(maps, x[0].new_empty(()), values, slots_per_rank, packed)

        return wait

    def combine(self, y: Owned, received: list[Received], own: Owned | None = None) -> Owned:
        hops = [self.check_received(y, received, RowHandle)]  # the last hop first
        while before := [handle.before for handle in hops[-1] if handle.before is not None]:
            hops.append(before)
        self.check_own(own, received, [len(handle.row_map.token_to_rows) for handle in hops[-1]])
        for handles in hops:
            link = handles[0].link if handles[0].link.requires_grad else anchor()
            maps = [handle.row_map for handle in handles]
            added = (own or []) if handles is hops[-1] else []
            y = list(Combine.apply(self.group, maps, not self.host_waits, link, *y, *added))
        return y

    def carry_failure(self, call: Call) -> None:
        # With max_tokens_per_rank this exchange exists only where the host may read values.
        self._exchange_counts(call, [], [], torch.empty(0, device=call.device))

    def _exchange_counts(
        self, call: Call, counts: Owned, facts: list[tuple[int, ...]], like: Tensor
    ) -> tuple[list[PerRank], list[PerRank]] | None:
        """Check the arguments of all ranks; return every owned rank's counts sent and got, None for fixed shapes."""
        group = self.group
        if self.max_tokens_per_rank is None:
            return call.swap_counts(COUNTS_STAGE, counts, FACTS, facts, self.num_counts)
        if values_readable(like):
            call.agree("dispatch", FACTS, facts)
            group.note_agreed(FACTS, facts)
            if (limit := self.max_copies_per_rank) is not None:
                total = group.gather("dispatch agreement", [kinds[1] for kinds in counts]).sum(0)
                if (worst := int(total.max())) > limit:
                    raise ValueError(
                        f"max_copies_per_rank must be at least the copies that rank {int(total.argmax())} gets "
                        f"({worst}), got {limit}"
                    )
        else:
            call.raise_failure()
            group.agree_new("dispatch", FACTS, facts, like.device)
        return None

    def _pack(
        self, tensors: Given, slots_per_rank: int, call: Call | None, forward_only: bool = False
    ) -> tuple[list[RowMap], Owned, Any]:
        """Return the owned ranks' row maps, the buffers to send, and the limits of copies for :meth:`_receive`."""
        group, num_ranks = self.group, self.group.topology.num_ranks
        call, facts, numbers = self._check_given(tensors, slots_per_rank, call, forward_only)
        x, slots, weights = tensors
        exchanged = self._exchange_counts(call, [n.counts for n in numbers], facts, x[0])
        if exchanged is None:
            equal = [[self.max_tokens_per_rank or 0] * num_ranks] * len(group.ranks)
            sent, received, max_copies = equal, equal, [self.max_copies_per_rank] * len(group.ranks)
        else:
            sent, received = ([kinds[0] for kinds in ranks] for ranks in exchanged)
            max_copies = [sum(kinds[1]) for kinds in exchanged[1]]
        group.traffic.move_to(x[0].device)
        for rank, numbered in zip(group.ranks, numbers, strict=True):
            group.traffic.rows.select(0, rank).add_(numbered.counts.select(0, 0))
        tokens = x, slots, weights, numbers
        return *pack_hop(
            tokens, slots_per_rank, sent, received, group.ranks, self.max_tokens_per_rank
        ), max_copies

    def _receive(
        self, maps: Sequence[RowMap], link: Tensor, values: Sequence[Tensor], slots_per_rank: int, packed: Any
    ) -> list[Received]:
        """Return Received of every owned rank. values: rows [N, H] of each, then slots [N, K], then weights."""
        return received(values, [RowHandle(row_map, link) for row_map in maps], packed)

    def _check_given(
        self, tensors: Given, slots_per_rank: int, call: Call | None, forward_only: bool
    ) -> tuple[Call, list[tuple[int, ...]], list[RowNumbers]]:
        """Return the call, FACTS and the rows to every rank, for arguments that fit; else the call has the failure."""
        group, capacity, num_ranks = self.group, self.max_tokens_per_rank, self.group.topology.num_ranks
        x, slots, weights = tensors
        call = self.check_dispatch(x, slots, weights, call)
        numbers: list[RowNumbers] = []
        facts: list[tuple[int, ...]] = []
        with call.at("dispatch"):
            if forward_only:
                refuse_gradients()
            for rank, rows in zip(group.ranks, x, strict=True):
                if capacity is not None and len(rows) > capacity:
                    raise ValueError(
                        f"x of rank {rank} must have at most max_tokens_per_rank={capacity} tokens, got {len(rows)}"
                    )
            facts = [
                dispatch_facts(*parts, slots_per_rank, num_ranks)
                for parts in zip(group.ranks, x, slots, weights, strict=True)
            ]
            numbers = [number_rows(s, slots_per_rank, num_ranks) for s in slots]
        return call, facts, numbers


def pack_hop(
    tokens: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[RowNumbers]],
    slots_per_place: int,
    sent: PerRank,
    got: PerRank,
    own_destination: Sequence[int],
    capacity: int | None,
) -> tuple[list[RowMap], Owned]:
    """Return where every owned rank's rows go, and the buffers; tokens: rows, slots, weights and their numbers."""
    maps, payload = [], []
    for r, (rows, slots, weights, numbers) in enumerate(zip(*tokens, strict=True)):
        packed, *places = pack_rows(
            rows.detach(), slots, weights.detach(), numbers, slots_per_place, sum(sent[r]), capacity
        )
        maps.append(RowMap(sent[r], got[r], places[0], places[1], places[2], own_destination[r]))
        payload.append(packed)
    return maps, payload


def received(
    values: Sequence[Tensor], handles: Sequence[RowHandle], max_copies: Sequence[int | None]
) -> list[Received]:
    """Return Received of every owned rank; values: the rows of each, then the slots, then the weights."""
    owned = len(handles)
    columns = (values[i * owned : (i + 1) * owned] for i in range(3))
    return [Received(*fields) for fields in zip(*columns, handles, max_copies, strict=True)]


class Hops(NamedTuple):
    """Rows sent and got, [R] of every owned rank, by leaders and within its node, and the limit of copies."""

    across: tuple[PerRank, PerRank]
    inside: tuple[PerRank, PerRank]
    max_copies: list[int | None]


class NodeDispatcher(RowDispatcher):
    """Rows arrive by leader, then source node, then token; the arguments are those of RowDispatcher. A token's sum in a
    node, and its gradient of x, is rounded to the dtype of the rows before it leaves the node. The second hop of a
    started dispatch begins when the caller waits for the first.
    """

    adds_in_nodes = True

    def __init__(
        self, group: Group, max_tokens_per_rank: int | None = None, max_copies_per_rank: int | None = None
    ) -> None:
        super().__init__(group, max_tokens_per_rank, max_copies_per_rank)
        self.num_counts = 3 + group.topology.ranks_per_node

    def _pack(
        self, tensors: Given, slots_per_rank: int, call: Call | None, forward_only: bool = False
    ) -> tuple[list[RowMap], Owned, Hops]:
        group, topology = self.group, self.group.topology
        call, facts, numbers = self._check_given(tensors, slots_per_rank, call, forward_only)
        x, slots, weights = tensors
        slots_per_node = topology.ranks_per_node * slots_per_rank
        to_nodes, counts = list[RowNumbers](), Owned()
        with call:
            to_nodes = [number_rows(row_slots, slots_per_node, topology.num_nodes) for row_slots in slots]
            counts = [n.counts for n in numbers]
            if self.host_waits:
                counts = list(map(self._count_hops, group.ranks, counts, to_nodes))
        exchanged = self._exchange_counts(call, counts, facts, x[0])
        hops = self._fixed_hops() if exchanged is None else self._hops(*exchanged)
        group.traffic.move_to(x[0].device)
        nodes = [rank // topology.ranks_per_node for rank in group.ranks]
        for rank, node, numbered in zip(group.ranks, nodes, to_nodes, strict=True):
            away = numbered.counts.select(0, 0).clone()
            away.narrow(0, node, 1).zero_()
            self._leaders(group.traffic.rows.select(0, rank), rank).add_(away)
        tokens = x, slots, weights, to_nodes
        return *pack_hop(tokens, slots_per_node, *hops.across, nodes, self.max_tokens_per_rank), hops

    def _receive(
        self,
        maps: Sequence[RowMap],
        link: Tensor,
        values: Sequence[Tensor],
        slots_per_rank: int,
        packed: Hops,
    ) -> list[Received]:
        """Run the second hop: rows [N, H], slots [N, K] in the node and weights [N, K], as leaders received them."""
        group, topology, owned = self.group, self.group.topology, len(maps)
        rows, slots, weights = (values[i * owned : (i + 1) * owned] for i in range(3))
        per_node = topology.ranks_per_node
        numbers = [number_rows(row_slots, slots_per_rank, per_node) for row_slots in slots]
        for rank, numbered in zip(group.ranks, numbers, strict=True):
            inside = group.traffic.rows.select(0, rank).narrow(0, topology.node_of(rank).start, per_node)
            inside.add_(numbered.counts.select(0, 0))
        capacity = None if self.max_tokens_per_rank is None else self.max_tokens_per_rank * topology.num_nodes
        places = [rank % per_node for rank in group.ranks]
        tokens = rows, slots, weights, numbers
        inner, payload = pack_hop(tokens, slots_per_rank, *packed.inside, places, capacity)
        last, *parts = Dispatch.apply(group, inner, payload, link, *rows, *weights)
        handles = [RowHandle(m, last, RowHandle(first, link)) for m, first in zip(inner, maps, strict=True)]
        return received(parts, handles, packed.max_copies)

    def _leaders(self, of_ranks: Tensor, rank: int) -> Tensor:
        """Return the [num_nodes] entries of a rank's leaders in a vector [R]."""
        per_node = self.group.topology.ranks_per_node
        return of_ranks.view(-1, per_node).select(1, rank % per_node)

    def _count_hops(self, rank: int, counts: Tensor, to_nodes: RowNumbers) -> Tensor:
        """Return [3 + L, R], the counts that other ranks need for both hops: rows and copies to every rank; the rows to
        each leader; and, for each of the L positions in the leader's node, how many of these continue to it.
        """
        per_node = self.group.topology.ranks_per_node
        to_leaders = torch.zeros_like(counts[0])
        self._leaders(to_leaders, rank).copy_(to_nodes.counts.select(0, 0))
        fanned = counts.select(0, 0).view(-1, per_node).t()  # [L, num_nodes]
        return torch.cat([counts, to_leaders.unsqueeze(0), fanned.repeat_interleave(per_node, dim=1)])

    def _hops(self, sent: list[PerRank], arriving: list[PerRank]) -> Hops:
        per_node = self.group.topology.ranks_per_node
        outward, back = PerRank(), PerRank()
        for rank, of_kind in zip(self.group.ranks, arriving, strict=True):
            # Rows that came to this rank as the leader of the sources in its position.
            fanned = [sum(to_place[rank % per_node :: per_node]) for to_place in of_kind[3:]]
            came = [sum(of_kind[0][place::per_node]) for place in range(per_node)]
            outward.append(self._in_node(rank, fanned))
            back.append(self._in_node(rank, came))
        across = [kinds[2] for kinds in sent], [kinds[2] for kinds in arriving]
        return Hops(across, (outward, back), [sum(kinds[1]) for kinds in arriving])

    def _fixed_hops(self) -> Hops:
        topology, capacity = self.group.topology, self.max_tokens_per_rank
        assert capacity is not None
        per_node = topology.ranks_per_node
        across, inside = PerRank(), PerRank()
        for rank in self.group.ranks:
            alike = (other % per_node == rank % per_node for other in range(topology.num_ranks))
            across.append([capacity if flag else 0 for flag in alike])
            inside.append(self._in_node(rank, [capacity * topology.num_nodes] * per_node))
        max_copies: list[int | None] = [self.max_copies_per_rank] * len(across)
        return Hops((across, across), (inside, inside), max_copies)

    def _in_node(self, rank: int, by_place: list[int]) -> list[int]:
        """Return [R] numbers of the ranks of a rank's node, 0 for all other ranks."""
        near = self.group.topology.node_of(rank)
        last = self.group.topology.num_ranks - near.stop
        return [*([0] * near.start), *by_place, *([0] * last)]
