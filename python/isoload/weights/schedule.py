"""The moves from one placement to the next, in an order in which no expert is lost.

Plain planning on the host: every rank computes the same schedule from the same rows, and nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from isoload.weights.moves import Address, Move

Rows = Sequence[Sequence[int]]  # [R][rows of the rank] the expert in each weight row, -1 = none


def plan_moves(current: Rows, wanted: Rows, rows_per_chunk: int) -> list[list[Move]]:
    """The moves that bring every row to its wanted content, in chunks; in a chunk all reads come before the writes.

    After every chunk each expert still has a row. A row is written once, and only if it changes, but for cycles of
    rows longer than a chunk: each chunk that cuts one has one move more, which parks what it displaces.

    Args:
        current: what the rows hold; all copies of an expert are equal.
        wanted: what they shall hold, -1 = anything; rows beyond a rank's list may hold anything, too. Every expert
            of current is in wanted and the other way round; no rank's list has one twice.
        rows_per_chunk: most moves of a chunk, over all ranks, at least 2.
    """
    schedule = _Schedule(current, wanted)
    chunks = []
    while schedule.pending:
        chunks.append(schedule.next_chunk(rows_per_chunk))
    return chunks


class _Schedule:
    """The content of the rows as the moves go on, and the rows that lack theirs."""

    def __init__(self, current: Rows, wanted: Rows) -> None:
        self.content = _by_address(current)
        self.wanted = _by_address(wanted)
        self.holders: dict[int, set[Address]] = {}
        for address, expert in self.content.items():
            self.holders.setdefault(expert, set()).add(address)
        self.pending = {a: e for a, e in sorted(self.wanted.items()) if self.content.get(a) != e}
        self.waiting: dict[int, list[Address]] = {}  # the pending rows of an expert, ascending
        for address, expert in self.pending.items():
            self.waiting.setdefault(expert, []).append(address)

    def next_chunk(self, size: int) -> list[Move]:
        """Chains from their ends, then whole cycles; a cycle that no chunk can hold is cut."""
        self.readable = {expert: sorted(rows) for expert, rows in self.holders.items()}
        chunk: list[Move] = []
        while self.pending and len(chunk) < size:
            free = next((a for a in self.pending if self._next_of(a) is None), None)
            if free is not None:
                chunk.append(self._move(self.pending[free], free))
                continue
            cycle, room = self._cycle(), size - len(chunk)
            if len(cycle) <= room:
                chunk += self._rotate(cycle)
            elif len(cycle) <= size or room < 2:
                break
            else:
                parked = self.content[cycle[room - 1]]
                chunk += self._rotate(cycle[:room], parked)
        return chunk

    def _next_of(self, address: Address) -> Address | None:
        """The row that must read this one before it is overwritten; None = no row must.

        One on the same rank, which need not fetch its content from afar then, or any if this is the last copy. A rank
        that holds an expert twice, as where one was parked, may lose either row. So no two rows have the same next row,
        and where no pending row is free, they lie on cycles.
        """
        expert = self.content.get(address)
        if expert is None or any(a.rank == address.rank and a != address for a in self.holders[expert]):
            return None
        waiting = self.waiting.get(expert, [])
        here = [a for a in waiting if a.rank == address.rank]
        last = len(self.holders[expert]) == 1
        return next(iter(here or (waiting if last else [])), None)

    def _cycle(self) -> list[Address]:
        """The cycle through the lowest pending row: each row's content goes to the row after it."""
        cycle = [next(iter(self.pending))]
        while (following := self._next_of(cycle[-1])) != cycle[0]:
            assert following is not None
            cycle.append(following)
        return cycle

    def _rotate(self, cycle: list[Address], parked: int | None = None) -> list[Move]:
        """Fills every row from the one before it; the first from the last, or with what is parked in it."""
        contents = [self.content[a] for a in cycle]
        first = contents[-1] if parked is None else parked
        return [self._move(e, a) for e, a in zip([first, *contents[:-1]], cycle, strict=True)]

    def _move(self, expert: int, target: Address) -> Move:
        source = min(self.readable[expert], key=lambda a: (a.rank != target.rank, a))
        if (old := self.content.get(target)) is not None:
            self.holders[old].discard(target)
        self.content[target] = expert
        self.holders[expert].add(target)
        if self.wanted[target] == expert:
            del self.pending[target]
            self.waiting[expert].remove(target)
        return Move(source, target)


def _by_address(rows: Rows) -> dict[Address, int]:
    return {
        Address(rank, row): expert
        for rank, experts in enumerate(rows)
        for row, expert in enumerate(experts)
        if expert >= 0
    }
