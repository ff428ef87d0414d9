"""RowDispatcher: a token travels once to every rank that holds a slot of its, by one all-to-all of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoload.ops import number_rows, pack_rows
from isoload.ops.results import RowNumbers
from isoload.transport.dispatcher import FACTS, Dispatcher, Received, dispatch_facts, refuse_gradients
from isoload.transport.exchanges import Owned, PerRank
from isoload.transport.group import Call, Group
from isoload.transport.rows import Combine, Dispatch, RowMap, anchor, unpack_payload
from isoload.value_checks import values_readable

COUNTS_STAGE = "dispatch row counts"
Given = tuple[Owned, Owned, Owned]  # x, slots and weights of the owned ranks


@dataclass(frozen=True, eq=False)
class RowHandle:
    """What combine needs of a hop of rows: the rank's row map, and the link by which gradients find their way back.

    before: the hop that brought the rows to where this one began; None where tokens did.
    """

    row_map: RowMap
    link: Tensor
    before: RowHandle | None = None


class RowDispatcher(Dispatcher):
    """Rows arrive by source rank, then token. All ranks of the group construct it together.

    Args:
        group: joins the ranks.
        max_tokens_per_rank: C. Every pair of ranks exchanges C rows, so shapes are fixed and the host never waits;
            N = R * C, and the rows of source s start at s * C. None: exactly the rows there are, and the host waits
            once per dispatch.
        max_copies_per_rank: beside max_tokens_per_rank, most copies that a rank gets in a batch: the experts' buffers
            then hold so many, not N*K. More are a ValueError on all ranks on CPU; on a GPU they are left out, and
            :func:`isoload.ops.check_device` raises. Without max_tokens_per_rank the host reads the number with that of
            the rows.

    Raises:
        ValueError: on all ranks alike, if a capacity is below 1 or differs between the ranks.
    """

    num_counts = 2  # rows and copies to every rank

    def __init__(
        self, group: Group, max_tokens_per_rank: int | None = None, max_copies_per_rank: int | None = None
    ) -> None:
        given = {"max_tokens_per_rank": max_tokens_per_rank, "max_copies_per_rank": max_copies_per_rank}
        with group.agreeing("construction") as facts:
            for name, value in given.items():
                if value is not None and value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")
            if max_tokens_per_rank is None and max_copies_per_rank is not None:
                raise ValueError(
                    f"max_copies_per_rank needs max_tokens_per_rank, got {max_copies_per_rank} and None"
                )
            facts.update(given)
        self.group = group
        self.max_tokens_per_rank = max_tokens_per_rank
        self.max_copies_per_rank = max_copies_per_rank
        self.host_waits = max_tokens_per_rank is None

    def dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        maps, payload, rest = self._pack((x, slots, weights), slots_per_rank, call)
        link, *values = Dispatch.apply(self.group, maps, payload, anchor(), *x, *weights)
        return self._receive(maps, link, values, slots_per_rank, rest)

    def start_dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> Callable[[], list[Received]]:
        """See :meth:`Dispatcher.start_dispatch`. The row counts are exchanged before it returns."""
        maps, payload, rest = self._pack((x, slots, weights), slots_per_rank, call, forward_only=True)
        finish = self.group.start_send("dispatch", payload, maps)

        def wait() -> list[Received]:
            values = [part for column in unpack_payload(finish(), x[0], weights[0]) for part in column]
            return self._receive(maps, x[0].new_empty(()), values, slots_per_rank, rest)

        return wait

    def combine(self, y: Owned, received: list[Received], own: Owned | None = None) -> Owned:
        hops = [self.check_received(y, received, RowHandle)]  # the last one first
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
        # with max_tokens_per_rank there is such an exchange where the host may read values
        self._exchange_counts(call, [], [], torch.empty(0, device=call.device))

    def _exchange_counts(
        self, call: Call, counts: Owned, facts: list[tuple[int, ...]], like: Tensor
    ) -> tuple[list[PerRank], list[PerRank]] | None:
        """Once all ranks have given arguments that fit: every owned rank's counts sent and got; None: shapes are fixed.

        Args:
            call: that may have failed.
            counts: [num_counts, R] int64 each: rows and copies to every destination, first of all.
            facts: FACTS of every owned rank.
            like: on whose device the ranks meet.
        """
        group = self.group
        if self.max_tokens_per_rank is None:
            return call.swap_counts(COUNTS_STAGE, counts, FACTS, facts, self.num_counts)
        if values_readable(like):
            call.agree("dispatch", FACTS, facts)
            group.note_agreed(FACTS, facts)
            self._check_copies([own[1] for own in counts])
        else:
            call.raise_failure()
            group.agree_new("dispatch", FACTS, facts, like.device)
        return None

    def _pack(
        self, given: Given, slots_per_rank: int, call: Call | None, forward_only: bool = False
    ) -> tuple[list[RowMap], Owned, Any]:
        """Where every owned rank's tokens go, what it sends, and for :meth:`_receive` most copies that it gets."""
        group, num_ranks = self.group, self.group.topology.num_ranks
        call, facts, numbers = self._check_given(given, slots_per_rank, call, forward_only)
        x, slots, weights = given
        exchanged = self._exchange_counts(call, [n.counts for n in numbers], facts, x[0])
        if exchanged is None:
            equal = [[self.max_tokens_per_rank or 0] * num_ranks] * len(group.ranks)
            sent, got, most = equal, equal, [self.max_copies_per_rank] * len(group.ranks)
        else:
            sent, got = ([kinds[0] for kinds in ranks] for ranks in exchanged)
            most = [sum(kinds[1]) for kinds in exchanged[1]]
        group.traffic.move_to(x[0].device)
        for rank, found in zip(group.ranks, numbers, strict=True):
            group.traffic.rows.select(0, rank).add_(found.counts.select(0, 0))
        tokens = x, slots, weights, numbers
        return *pack_hop(tokens, slots_per_rank, sent, got, group.ranks, self.max_tokens_per_rank), most

    def _receive(
        self, maps: Sequence[RowMap], link: Tensor, values: Sequence[Tensor], slots_per_rank: int, rest: Any
    ) -> list[Received]:
        """values: rows [N, H] of every owned rank, then slots [N, K] of each, then weights. rest: as packed."""
        handles = [RowHandle(row_map, link) for row_map in maps]
        return received(values, handles, rest)

    def _check_given(
        self, given: Given, slots_per_rank: int, call: Call | None, forward_only: bool
    ) -> tuple[Call, list[tuple[int, ...]], list[RowNumbers]]:
        """The call, FACTS and the rows to every rank, of arguments that fit; else the call has the failure."""
        group, capacity, num_ranks = self.group, self.max_tokens_per_rank, self.group.topology.num_ranks
        x, slots, weights = given
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
                dispatch_facts(*of, slots_per_rank, num_ranks)
                for of in zip(group.ranks, x, slots, weights, strict=True)
            ]
            numbers = [number_rows(s, slots_per_rank, num_ranks) for s in slots]
        return call, facts, numbers

    def _check_copies(self, copies: Owned) -> None:
        """Raises ValueError on all ranks alike if a rank gets more than max_copies_per_rank, of copies [R] to each."""
        most = self.max_copies_per_rank
        if most is None:
            return
        total = self.group.gather("dispatch agreement", copies).sum(0)
        if (worst := int(total.max())) > most:
            raise ValueError(
                f"max_copies_per_rank must be at least the copies that rank {int(total.argmax())} gets ({worst}), "
                f"got {most}"
            )


def pack_hop(
    tokens: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[RowNumbers]],
    slots_per_place: int,
    sent: PerRank,
    got: PerRank,
    own: Sequence[int],
    capacity: int | None,
) -> tuple[list[RowMap], Owned]:
    """Where every owned rank's rows go, and what it sends.

    Args:
        tokens: rows [T, H], slots [T, K], weights [T, K] and the numbers of the rows to every destination.
        slots_per_place: slots of a destination.
        sent, got: [R] rows each.
        own: the destination that a rank itself belongs to.
        capacity: see :func:`isoload.ops.pack_rows`.
    """
    maps, payload = [], []
    for r, (rows, slots, weights, numbers) in enumerate(zip(*tokens, strict=True)):
        packed, *places = pack_rows(
            rows.detach(), slots, weights.detach(), numbers, slots_per_place, sum(sent[r]), capacity
        )
        maps.append(RowMap(sent[r], got[r], places[0], places[1], places[2], own[r]))
        payload.append(packed)
    return maps, payload


def received(
    values: Sequence[Tensor], handles: Sequence[RowHandle], most: Sequence[int | None]
) -> list[Received]:
    """Of every owned rank; values: the rows of each, then the slots, then the weights."""
    owned = len(handles)
    columns = (values[i * owned : (i + 1) * owned] for i in range(3))
    return [Received(*fields) for fields in zip(*columns, handles, most, strict=True)]
