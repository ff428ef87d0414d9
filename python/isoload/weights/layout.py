"""Layout: the expert in each weight row of each rank; Move: a copy of one row into another.

Both are the same on every rank. Home rows come first, then replica rows; a new placement keeps rows in place where it
can. Empty slots, and second slots of one expert on one rank, have no row. Stacks are owned ranks' tensors [rows, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isoload.checks import put_on
from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import Group, SendCounts
from isoload.transport.dispatcher import unpack

Stacks = list[list[Tensor]]
Wait = Callable[[], None]


class Address(NamedTuple):
    """A row of a rank."""

    rank: int
    row: int


class Move(NamedTuple):
    """A copy of one row into another."""

    source: Address
    target: Address


@dataclass(frozen=True, eq=False)
class RankMoves(SendCounts):
    """One rank's part of a list of moves."""

    leaving: list[int]  # rows that other ranks read, by reading rank, then in order of the list
    arriving: list[int]  # rows that other ranks fill, by filling rank, then in order of the list
    copied: list[int]  # rows that the rank itself reads
    filled: list[int]  # rows that are filled from copied

    @staticmethod
    def from_moves(moves: Sequence[Move], rank: int, num_ranks: int) -> RankMoves:
        to_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        from_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        copied, filled = [], []
        for source, target in moves:
            if source.rank == target.rank == rank:
                copied.append(source.row)
                filled.append(target.row)
            elif source.rank == rank:
                to_rank[target.rank].append(source.row)
            elif target.rank == rank:
                from_rank[source.rank].append(target.row)
        return RankMoves(
            leaving=[row for rows in to_rank for row in rows],
            arriving=[row for rows in from_rank for row in rows],
            sent=list(map(len, to_rank)),
            got=list(map(len, from_rank)),
            copied=copied,
            filled=filled,
        )


def start_moves(group: Group, stage: str, moves: Sequence[Move], sources: Stacks, targets: Stacks) -> Wait:
    """Read the sources of all moves, begin the exchange, and return a function that waits for the rows and writes them.
    All ranks call it together with the same moves to distinct rows. Sources and targets may be the same stacks.
    """
    parts = parts_of(group, moves)
    buffers = [pack_rows(stacks, part.leaving) for stacks, part in zip(sources, parts, strict=True)]
    copies = [pack_rows(stacks, part.copied) for stacks, part in zip(sources, parts, strict=True)]
    finish = group.start_send(stage, buffers, parts) if travels(moves) else lambda: buffers

    def wait() -> None:
        arrived = finish()
        for part, stacks, arrived_rows, copied in zip(parts, targets, arrived, copies, strict=True):
            put_rows(stacks, part.arriving, arrived_rows)
            put_rows(stacks, part.filled, copied)
        for buffer in (*buffers, *copies, *arrived):
            if buffer.is_cuda:
                # Another stream may have allocated it: keep it until the current stream has finished its present work.
                buffer.record_stream(torch.cuda.current_stream(buffer.device))

    return wait


@torch.no_grad()
def move_rows(group: Group, stage: str, moves: Sequence[Move], sources: Stacks, targets: Stacks) -> None:
    start_moves(group, stage, moves, sources, targets)()


def add_back(group: Group, stage: str, moves: Sequence[Move], grads: Stacks, totals: Stacks) -> None:
    """Add the gradients of the moves' targets to the totals of their sources, by ascending rank of origin, then in
    order of the list, in max(float32, dtype), and rounded once: the same sum in every run and on every backend.
    """
    parts = parts_of(group, moves)
    buffers = [pack_rows(stacks, part.arriving) for stacks, part in zip(grads, parts, strict=True)]
    returned = group.send_back(stage, buffers, parts) if travels(moves) else buffers
    for rank, part, stacks, sums, buffer in zip(group.ranks, parts, grads, totals, returned, strict=True):
        rows = part.leaving
        if part.copied:  # at the rank's own position in the order
            first = sum(part.sent[:rank])
            rows = [*rows[:first], *part.copied, *rows[first:]]
            buffer = torch.cat([buffer[:first], pack_rows(stacks, part.filled), buffer[first:]])
        columns = unpack(buffer, [(stack.shape[1:].numel(), stack.dtype) for stack in stacks])
        for total, values in zip(sums, columns, strict=True):
            add_rows(total, rows, values.view(-1, *total.shape[1:]))


def add_rows(total: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Add values [n, ...] to the rows of a total, in order, in max(float32, dtype); every row is rounded once."""
    exact = torch.promote_types(total.dtype, torch.float32)
    for row in dict.fromkeys(rows):
        added = total[row].to(exact)
        for i in (i for i, other in enumerate(rows) if other == row):
            added = added + values[i]
        total[row] = added


def parts_of(group: Group, moves: Sequence[Move]) -> list[RankMoves]:
    return [RankMoves.from_moves(moves, rank, group.topology.num_ranks) for rank in group.ranks]


def travels(moves: Sequence[Move]) -> bool:
    """Return whether any row leaves its rank; the same on all ranks, as the moves are."""
    return any(source.rank != target.rank for source, target in moves)


def pack_rows(stacks: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Return [n, bytes], the selected rows of all stacks, concatenated."""
    index = put_on(stacks[0].device, rows)
    return torch.cat([as_bytes(stack.contiguous()).index_select(0, index) for stack in stacks], dim=1)


def put_rows(stacks: Sequence[Tensor], rows: Sequence[int], buffer: Tensor) -> None:
    index = put_on(buffer.device, rows)
    widths = [stack.shape[1:].numel() * stack.itemsize for stack in stacks]
    for stack, part in zip(stacks, buffer.split(widths, dim=1), strict=True):
        as_bytes(stack).index_copy_(0, index, part)


def as_bytes(stack: Tensor) -> Tensor:
    """Return [rows, bytes] uint8, a view of a contiguous stack: copies are the same for every dtype."""
    # Via one dimension: a contiguous stack of single elements may have stride 0.
    return stack.view(-1).view(torch.uint8).view(len(stack), stack.shape[1:].numel() * stack.itemsize)


@dataclass(frozen=True)
class Layout:
    """The weight rows of one rank and layer."""

    homes: tuple[int, ...]  # experts of the rank's home rows
    replicas: tuple[int, ...]  # experts of the replica rows, which follow
    row_of_slot: tuple[int, ...]  # [S] weight row of every local slot, -1 = none

    @property
    def experts(self) -> tuple[int, ...]:
        return self.homes + self.replicas


def layouts(placed: PlacedLayers, before: Sequence[Layout] | None = None) -> list[Layout]:
    """Return [R] the rows of every rank for one layer; experts keep their rows of `before` where possible."""
    host, num_ranks = placed.host, placed.topology.num_ranks
    assert placed.layer is not None
    slots = host.arrays[0][placed.layer].reshape(num_ranks, -1)
    home_slot = host.arrays[1][placed.layer]
    size = host.slots_per_rank
    result = []
    for rank, experts in enumerate(slots.tolist()):
        homes: list[int] = []
        replicas: list[int] = []
        for place, expert in enumerate(experts):
            if expert < 0 or expert in experts[:place]:
                continue
            is_home = home_slot[expert] == rank * size + place
            (homes if is_home else replicas).append(expert)
        if before is not None:
            rows, count = keep_rows(before[rank].experts, homes, replicas), len(homes)
            homes, replicas = rows[:count], rows[count:]
        row = {e: i for i, e in enumerate(homes + replicas)}
        row_of_slot = tuple(row[e] if e >= 0 and e not in experts[:i] else -1 for i, e in enumerate(experts))
        result.append(Layout(tuple(homes), tuple(replicas), row_of_slot))
    return result


def shard_layouts(placed: PlacedLayers) -> list[Layout]:
    """Return [R] the rows of every rank whose home rows ascend by expert, as in a Shard."""
    return layouts(placed, [Layout(tuple(sorted(layout.homes)), (), ()) for layout in layouts(placed)])


def home_addresses(layouts: Sequence[Layout]) -> dict[int, Address]:
    return {
        e: Address(rank, row) for rank, layout in enumerate(layouts) for row, e in enumerate(layout.homes)
    }


def replica_moves(layouts: Sequence[Layout]) -> list[Move]:
    """Return moves from home rows to all replica rows, by rank and row; replica rows are numbered from 0."""
    home = home_addresses(layouts)
    return [
        Move(home[expert], Address(rank, i))
        for rank, layout in enumerate(layouts)
        for i, expert in enumerate(layout.replicas)
    ]


def keep_rows(before: Sequence[int], homes: Sequence[int], replicas: Sequence[int]) -> list[int]:
    """Return a rank's experts by row, homes first; those in their part of `before` keep it, others take free rows."""
    after: list[int] = []
    for experts in (homes, replicas):
        part = [*before, *[-1] * (len(homes) + len(replicas))][len(after) : len(after) + len(experts)]
        moving = iter([e for e in experts if e not in part])
        after += [e if e in experts else next(moving) for e in part]
    return after


def count_rows(placed: PlacedLayers, weight_rows: int | None) -> list[int]:
    assert placed.layer is not None
    filled = placed.host.arrays[0][placed.layer].reshape(placed.topology.num_ranks, -1) >= 0
    counts: list[int] = filled.sum(1).tolist()
    if weight_rows is None:
        return counts
    if weight_rows < max(counts):
        raise ValueError(
            f"weight_rows must be at least {max(counts)}, which rank {counts.index(max(counts))} needs, "
            f"got {weight_rows}"
        )
    return [weight_rows] * len(counts)
