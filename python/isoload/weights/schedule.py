"""The moves from one placement to the next, in an order in which no expert is lost; the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from isoload.weights.layout import Address, Move

Rows = Sequence[Sequence[int]]  # [R][rows of the rank] the expert in each weight row, -1 = none


def plan_moves(current: Rows, wanted: Rows, rows_per_chunk: int) -> list[list[Move]]:
    """Return the moves that bring every row to its wanted content, in chunks. All reads of a chunk come first.

    After every chunk each expert still has a row. A row is written once, and only if it changes, except that each chunk
    that cuts a longer cycle of rows has one more move, which parks the displaced expert. A rank sends and receives at
    most rows_per_chunk / R rows of a chunk (rounded up), because the busiest rank determines the time; a chunk that
    begins with a cycle of rows may have up to rows_per_chunk (at least 2). `current` and `wanted` (-1 = any content)
    must contain the same experts; no rank's list has an expert twice.
    """
    schedule = _Schedule(current, wanted)
    chunks = []
    while schedule.pending:
        chunks.append(schedule.next_chunk(rows_per_chunk))
    return chunks


def spread_moves(moves: Sequence[Move], rows_per_chunk: int, num_ranks: int) -> list[list[Move]]:
    """Return moves of which none reads a row that another one writes, in chunks as those of :func:`plan_moves`."""
    limit = -(-rows_per_chunk // num_ranks)
    chunks = []
    left = list(moves)
    while left:
        arriving: Counter[int] = Counter()
        leaving: Counter[int] = Counter()
        chunk: list[Move] = []
        later: list[Move] = []
        for move in left:
            source, target = move.source.rank, move.target.rank
            local = source == target
            busy = not local and (arriving[target] >= limit or leaving[source] >= limit)
            if busy or len(chunk) == rows_per_chunk:
                later.append(move)
                continue
            chunk.append(move)
            if not local:
                arriving[target] += 1
                leaving[source] += 1
        chunks.append(chunk)
        left = later
    return chunks


class _Schedule:
    """Content of the rows while the moves are planned, and the rows that lack their content."""

    def __init__(self, current: Rows, wanted: Rows) -> None:
        self.num_ranks = len(wanted)
        self.content = _by_address(current)
        self.wanted = _by_address(wanted)
        self.holders: dict[int, set[Address]] = {}
        for address, expert in self.content.items():
            self.holders.setdefault(expert, set()).add(address)
        self.pending = {a: e for a, e in sorted(self.wanted.items()) if self.content.get(a) != e}
        self.waiting: dict[int, list[Address]] = {}  # the pending rows of an expert, ascending
        for address, expert in self.pending.items():
            self.waiting.setdefault(expert, []).append(address)
        self.pending_of_rank = Counter(address.rank for address in self.pending)
        self.sent: Counter[int] = Counter()  # rows that each rank sends in all chunks so far
        self.free: set[Address] = set()  # the pending rows that no other row must read first
        self._note_free(self.pending)

    def next_chunk(self, size: int) -> list[Move]:
        """Return the moves of free rows, then whole cycles; a cycle that no chunk can hold is cut."""
        self.readable = {expert: sorted(rows) for expert, rows in self.holders.items()}
        self.arriving: Counter[int] = Counter()  # rows of this chunk that each rank receives
        self.leaving: Counter[int] = Counter()  # rows of this chunk that each rank sends
        limit = -(-size // self.num_ranks)
        chunk: list[Move] = []
        while self.pending and len(chunk) < size:
            if self.free:
                if (target := self._least_busy(limit)) is None:
                    break
                chunk.append(self._move(self.pending[target], target))
                continue
            cycles = [cycle for cycle in self._cycles() if len(cycle) <= size - len(chunk)]
            if cycles:
                cycle = min(cycles, key=lambda rows: self._level(rows, rows))
                if chunk and self._level(cycle, cycle) > limit:
                    break
                chunk += self._rotate(cycle)
            elif chunk:
                break
            else:
                chunk = self._cut(size)
        return chunk

    def _least_busy(self, limit: int) -> Address | None:
        """Return the free row whose rank and source are least busy in this chunk; None if all are busy."""
        best: tuple[int, int, Address] | None = None
        for target in self.free:
            expert, busy = self.pending[target], self.arriving[target.rank]
            source = self._source(expert, target)
            if source.rank == target.rank:
                busy = -1
            elif busy < limit:
                busy = max(busy, self.leaving[source.rank])
            if busy >= limit:
                continue
            # The weight 3 was chosen on fresh placements of 256 experts (bench/bench_moves.py).
            urgent = 3 * self.pending_of_rank[target.rank] + self._chain(target)
            key = busy, -urgent, target
            if best is None or key < best:
                best = key
        return None if best is None else best[2]

    def _chain(self, target: Address) -> int:
        """Return how many rows become free one after the other if this row is filled."""
        length = 0
        while (expert := self.pending.get(target)) is not None and length < len(self.pending):
            if len(self.waiting[expert]) > 1 or len(self.holders[expert]) > 1:
                break
            (target,) = self.holders[expert]
            length += 1
        return length

    def _source(self, expert: int, target: Address) -> Address:
        """Return the row to read: on the target's rank, else of the rank that sends least."""

        def busy(row: Address) -> tuple[bool, int, int, Address]:
            return row.rank != target.rank, self.leaving[row.rank], self.sent[row.rank], row

        return min(self.readable[expert], key=busy)

    def _next_of(self, address: Address) -> Address | None:
        """Return the row that must read this one before it is overwritten, on the same rank or anywhere if this is the
        last copy; None if no row must. No two rows have the same next row: if no pending row is free, they form cycles.
        """
        expert = self.content.get(address)
        if expert is None or any(a.rank == address.rank and a != address for a in self.holders[expert]):
            return None
        waiting = self.waiting.get(expert, [])
        local = [a for a in waiting if a.rank == address.rank]
        last = len(self.holders[expert]) == 1
        return next(iter(local or (waiting if last else [])), None)

    def _note_free(self, rows: Iterable[Address]) -> None:
        for address in rows:
            if address in self.pending and self._next_of(address) is None:
                self.free.add(address)
            else:
                self.free.discard(address)

    def _cycles(self) -> list[list[Address]]:
        """Return the cycles of the pending rows: each row's content goes to the next row."""
        cycles, visited = [], set()
        for first in self.pending:
            if first in visited:
                continue
            cycle = [first]
            while (following := self._next_of(cycle[-1])) != first:
                assert following is not None
                cycle.append(following)
            visited.update(cycle)
            cycles.append(cycle)
        return cycles

    def _level(self, targets: Sequence[Address], sources: Sequence[Address]) -> int:
        """Return the busiest rank's rows of this chunk if rows are copied to these targets from these sources."""
        arriving, leaving = self.arriving.copy(), self.leaving.copy()
        arriving.update(address.rank for address in targets)
        leaving.update(address.rank for address in sources)
        return max((*arriving.values(), *leaving.values()))

    def _cut(self, size: int) -> list[Move]:
        """Rotate the part of a cycle that keeps the busiest rank least busy; it parks one expert in its first row."""
        cycle = self._cycles()[0]
        around = cycle + cycle[: size - 1]
        parts = [around[first : first + size] for first in range(len(cycle))]
        part = min(parts, key=lambda rows: self._level(rows, rows))
        return self._rotate(part)

    def _rotate(self, cycle: list[Address]) -> list[Move]:
        contents = [self.content[a] for a in cycle]
        moved = [contents[-1], *contents[:-1]]
        return [self._move(expert, address) for expert, address in zip(moved, cycle, strict=True)]

    def _move(self, expert: int, target: Address) -> Move:
        source = self._source(expert, target)
        if source.rank != target.rank:
            self.arriving[target.rank] += 1
            self.leaving[source.rank] += 1
            self.sent[source.rank] += 1
        if (old := self.content.get(target)) is not None:
            self.holders[old].discard(target)
        self.content[target] = expert
        self.holders[expert].add(target)
        if self.wanted[target] == expert:
            del self.pending[target]
            self.waiting[expert].remove(target)
            self.pending_of_rank[target.rank] -= 1
        changed = self.holders[expert] | (self.holders[old] if old is not None else set())
        self._note_free((target, *changed))
        return Move(source, target)


def _by_address(rows: Rows) -> dict[Address, int]:
    return {
        Address(rank, row): expert
        for rank, experts in enumerate(rows)
        for row, expert in enumerate(experts)
        if expert >= 0
    }
