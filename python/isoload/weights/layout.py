"""Layout: which expert lies in which weight row of which rank. Made on the host from a placement, alike everywhere.

Home rows come first, replica rows behind them; both lie by ascending slot at first, and a new placement leaves them
where it can. Empty slots, and second slots of one expert on one rank, have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isoload.placement.placed_layers import PlacedLayers
from isoload.weights.moves import Address, Move


@dataclass(frozen=True)
class Layout:
    """The weight rows of one rank and layer.

    homes, replicas  experts of the rank's home rows and, behind them, replica rows
    row_of_slot      [S] weight row of every local slot, -1 = none
    """

    homes: tuple[int, ...]
    replicas: tuple[int, ...]
    row_of_slot: tuple[int, ...]

    @property
    def experts(self) -> tuple[int, ...]:
        """The expert in every weight row."""
        return self.homes + self.replicas


def layouts(placed: PlacedLayers, before: Sequence[Layout] | None = None) -> list[Layout]:
    """[R] the rows of every rank for one layer; the same on every rank, from the host's placement alone.

    Args:
        placed: one layer.
        before: the rows now; experts then keep their rows where they can.
    """
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
            at_home = home_slot[expert] == rank * size + place
            (homes if at_home else replicas).append(expert)
        if before is not None:
            rows, count = keep_rows(before[rank].experts, homes, replicas), len(homes)
            homes, replicas = rows[:count], rows[count:]
        row = {e: i for i, e in enumerate(homes + replicas)}
        row_of_slot = tuple(row[e] if e >= 0 and e not in experts[:i] else -1 for i, e in enumerate(experts))
        result.append(Layout(tuple(homes), tuple(replicas), row_of_slot))
    return result


def shard_layouts(placed: PlacedLayers) -> list[Layout]:
    """[R] the rows of every rank whose home rows ascend by expert, as in a Shard."""
    return layouts(placed, [Layout(tuple(sorted(own.homes)), (), ()) for own in layouts(placed)])


def home_addresses(layouts: Sequence[Layout]) -> dict[int, Address]:
    """The home row of every expert, from the layouts [R] of all ranks."""
    return {e: Address(rank, row) for rank, own in enumerate(layouts) for row, e in enumerate(own.homes)}


def replica_moves(layouts: Sequence[Layout]) -> list[Move]:
    """From home rows to all their replica rows, by rank and row of the replica, which counts from the first replica."""
    home = home_addresses(layouts)
    return [
        Move(home[expert], Address(rank, i))
        for rank, own in enumerate(layouts)
        for i, expert in enumerate(own.replicas)
    ]


def keep_rows(before: Sequence[int], homes: Sequence[int], replicas: Sequence[int]) -> list[int]:
    """The experts of a rank row by row, homes first: one that lies in its part already keeps its row.

    Args:
        before: expert in each weight row, -1 = none.
        homes, replicas: what the rank is to hold; those that cannot stay take the free rows in this order.
    """
    after: list[int] = []
    for experts in (homes, replicas):
        part = [*before, *[-1] * (len(homes) + len(replicas))][len(after) : len(after) + len(experts)]
        moving = iter([e for e in experts if e not in part])
        after += [e if e in experts else next(moving) for e in part]
    return after


def count_rows(placed: PlacedLayers, weight_rows: int | None) -> list[int]:
    """[R] weight rows of every rank: as many as its slots hold experts, or weight_rows."""
    assert placed.layer is not None
    held = placed.host.arrays[0][placed.layer].reshape(placed.topology.num_ranks, -1) >= 0
    counts: list[int] = held.sum(1).tolist()
    if weight_rows is None:
        return counts
    if weight_rows < max(counts):
        raise ValueError(
            f"weight_rows must be at least {max(counts)}, as rank {counts.index(max(counts))} holds, got {weight_rows}"
        )
    return [weight_rows] * len(counts)
