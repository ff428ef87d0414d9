"""NodeDispatcher: a token travels once to every node that holds a slot of its, and fans out inside of it.

Two hops of rows. In the first a rank sends to its *leaders*, on every node the rank with its own place in the node; in
the second a leader sends what came to it to the ranks of its node. Combine takes the same way back, so that what leaves
a node for a token is one row, its sum there. GRACE-MoE distributes tokens so (papers/002, implementation details);
DeepEP's kernels between nodes go by the same leaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isoload.ops import number_rows
from isoload.ops.results import RowNumbers
from isoload.transport.dispatcher import Received
from isoload.transport.exchanges import Owned, PerRank
from isoload.transport.group import Call, Group
from isoload.transport.row_dispatcher import Given, RowDispatcher, RowHandle, pack_hop, received
from isoload.transport.rows import Dispatch, RowMap


class Hop(NamedTuple):
    """Rows sent and got, [R] of every owned rank."""

    sent: PerRank
    got: PerRank


class Hops(NamedTuple):
    """What every owned rank sends to its leaders, what it fans out in its node, and most copies that it gets."""

    across: Hop
    inside: Hop
    most: list[int | None]


class NodeDispatcher(RowDispatcher):
    """Rows arrive by leader, then source node, then token. All ranks of the group construct it together.

    A token's sum in a node is rounded to the dtype of the rows before it leaves the node, as a rank's is in a
    :class:`RowDispatcher`, and so is the gradient of x. ``traffic.rows`` has the rows of both hops, without those that
    a rank hands to itself in the first: between ranks of two nodes, one for every token and other node that it goes to.
    A dispatch that was started fans out once it is waited for.

    Args:
        group: joins the ranks.
        max_tokens_per_rank: C. Every rank exchanges C rows with each of its leaders and, inside of the node, C for
            every node with each rank: N = R * C, as a RowDispatcher's. None: as there; the host waits once.
        max_copies_per_rank: as there.
    """

    adds_in_nodes = True

    def __init__(
        self, group: Group, max_tokens_per_rank: int | None = None, max_copies_per_rank: int | None = None
    ) -> None:
        super().__init__(group, max_tokens_per_rank, max_copies_per_rank)
        self.num_counts = 3 + group.topology.ranks_per_node

    def _pack(
        self, given: Given, slots_per_rank: int, call: Call | None, forward_only: bool = False
    ) -> tuple[list[RowMap], Owned, Hops]:
        """Where every owned rank's tokens go, what it sends to its leaders, and the sizes of both hops."""
        group, topology = self.group, self.group.topology
        call, facts, numbers = self._check_given(given, slots_per_rank, call, forward_only)
        x, slots, weights = given
        slots_per_node = topology.ranks_per_node * slots_per_rank
        to_nodes, counts = list[RowNumbers](), Owned()
        with call:
            to_nodes = [number_rows(own, slots_per_node, topology.num_nodes) for own in slots]
            counts = [n.counts for n in numbers]
            if self.host_waits:
                counts = list(map(self._count_hops, group.ranks, counts, to_nodes))
        exchanged = self._exchange_counts(call, counts, facts, x[0])
        hops = self._fixed_hops() if exchanged is None else self._hops(*exchanged)
        group.traffic.move_to(x[0].device)
        nodes = [rank // topology.ranks_per_node for rank in group.ranks]
        for rank, node, found in zip(group.ranks, nodes, to_nodes, strict=True):
            away = found.counts.select(0, 0).clone()
            away.narrow(0, node, 1).zero_()
            self._leaders(group.traffic.rows.select(0, rank), rank).add_(away)
        tokens, across = (x, slots, weights, to_nodes), hops.across
        capacity = self.max_tokens_per_rank
        return *pack_hop(tokens, slots_per_node, across.sent, across.got, nodes, capacity), hops

    def _receive(
        self, maps: Sequence[RowMap], link: Tensor, values: Sequence[Tensor], slots_per_rank: int, rest: Hops
    ) -> list[Received]:
        """The second hop: rows [N, H], slots [N, K] in the node and weights [N, K] of leaders to their node's ranks."""
        group, topology, owned = self.group, self.group.topology, len(maps)
        rows, slots, weights = (values[i * owned : (i + 1) * owned] for i in range(3))
        per_node = topology.ranks_per_node
        numbers = [number_rows(own, slots_per_rank, per_node) for own in slots]
        for rank, found in zip(group.ranks, numbers, strict=True):
            inside = group.traffic.rows.select(0, rank).narrow(0, topology.node_of(rank).start, per_node)
            inside.add_(found.counts.select(0, 0))
        capacity = None if self.max_tokens_per_rank is None else self.max_tokens_per_rank * topology.num_nodes
        places = [rank % per_node for rank in group.ranks]
        tokens, hop = (rows, slots, weights, numbers), rest.inside
        inner, payload = pack_hop(tokens, slots_per_rank, hop.sent, hop.got, places, capacity)
        last, *parts = Dispatch.apply(group, inner, payload, link, *rows, *weights)
        before = [RowHandle(row_map, link) for row_map in maps]
        handles = [RowHandle(row_map, last, first) for row_map, first in zip(inner, before, strict=True)]
        return received(parts, handles, rest.most)

    def _leaders(self, of_ranks: Tensor, rank: int) -> Tensor:
        """[num_nodes] the entries of a rank's leaders in a vector [R]."""
        per_node = self.group.topology.ranks_per_node
        return of_ranks.view(-1, per_node).select(1, rank % per_node)

    def _count_hops(self, rank: int, counts: Tensor, to_nodes: RowNumbers) -> Tensor:
        """[3 + L, R] what the other ranks must hear of, L ranks per node.

        Rows and copies to every rank; to a leader the rows that come to it; and, for each place in its node, how many
        of these fan out to the rank there. So the host waits once for both hops.
        """
        per_node = self.group.topology.ranks_per_node
        to_leaders = torch.zeros_like(counts[0])
        self._leaders(to_leaders, rank).copy_(to_nodes.counts.select(0, 0))
        fanned = counts.select(0, 0).view(-1, per_node).t()  # [L, num_nodes]
        return torch.cat([counts, to_leaders.unsqueeze(0), fanned.repeat_interleave(per_node, dim=1)])

    def _hops(self, sent: list[PerRank], got: list[PerRank]) -> Hops:
        """From what :meth:`_count_hops` made of every source, sent and got."""
        topology = self.group.topology
        per_node = topology.ranks_per_node
        out, back = PerRank(), PerRank()
        for rank, of_kind in zip(self.group.ranks, got, strict=True):
            # that came to this rank as the leader of the sources in its place
            fanned = [sum(to_place[rank % per_node :: per_node]) for to_place in of_kind[3:]]
            came = [sum(of_kind[0][place::per_node]) for place in range(per_node)]
            out.append(self._in_node(rank, fanned))
            back.append(self._in_node(rank, came))
        across = Hop([kinds[2] for kinds in sent], [kinds[2] for kinds in got])
        return Hops(across, Hop(out, back), [sum(kinds[1]) for kinds in got])

    def _fixed_hops(self) -> Hops:
        """With max_tokens_per_rank."""
        topology, capacity = self.group.topology, self.max_tokens_per_rank
        assert capacity is not None
        per_node = topology.ranks_per_node
        across, inside = PerRank(), PerRank()
        for rank in self.group.ranks:
            alike = (other % per_node == rank % per_node for other in range(topology.num_ranks))
            across.append([capacity if same else 0 for same in alike])
            inside.append(self._in_node(rank, [capacity * topology.num_nodes] * per_node))
        most: list[int | None] = [self.max_copies_per_rank] * len(across)
        return Hops(Hop(across, across), Hop(inside, inside), most)

    def _in_node(self, rank: int, by_place: list[int]) -> list[int]:
        """[R] numbers of the ranks of a rank's node, 0 of all others."""
        near = self.group.topology.node_of(rank)
        last = self.group.topology.num_ranks - near.stop
        return [*([0] * near.start), *by_place, *([0] * last)]
