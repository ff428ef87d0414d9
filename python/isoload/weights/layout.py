"""Residence: which experts a rank holds, row by row. Planned on the host from a placement, alike on every rank.

Home rows come first, replica rows behind them; both lie by ascending slot at first, and a new placement leaves them
where it can. Empty slots, and second slots of one expert on one rank, have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isoload.placed_layers import PlacedLayers
from isoload.weights.migrate import keep_rows


@dataclass(frozen=True)
class Residence:
    """What one rank holds of a layer, and the weight rows that travel between homes and replicas.

    homes, replicas  experts of the rank's home rows and, behind them, replica rows
    row_of_slot      [S] weight row of every local slot, -1 = none
    outgoing         home rows that are sent when replicas are refreshed, by receiving rank, then its replica row
    incoming         replica rows that arrive then, by sending rank, then replica row
    sent, got        [R] how many of them go to, and come from, every rank
    """

    homes: tuple[int, ...]
    replicas: tuple[int, ...]
    row_of_slot: tuple[int, ...]
    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]
    sent: list[int]
    got: list[int]

    @property
    def experts(self) -> tuple[int, ...]:
        """The expert in every weight row."""
        return self.homes + self.replicas


def residences(placed: PlacedLayers, before: Sequence[Residence] | None = None) -> list[Residence]:
    """[R] what every rank holds of one layer; the same on every rank, from the host's placement alone.

    Args:
        placed: one layer.
        before: what the ranks hold now; experts then keep their rows where they can.
    """
    host, num_ranks = placed.host, placed.topology.num_ranks
    assert placed.layer is not None
    slots = host.arrays[0][placed.layer].reshape(num_ranks, -1)
    home_slot = host.arrays[1][placed.layer]
    size = host.slots_per_rank
    homes: list[list[int]] = [[] for _ in range(num_ranks)]
    replicas: list[list[int]] = [[] for _ in range(num_ranks)]
    for rank, experts in enumerate(slots.tolist()):
        for place, expert in enumerate(experts):
            if expert < 0 or expert in experts[:place]:
                continue
            at_home = home_slot[expert] == rank * size + place
            (homes if at_home else replicas)[rank].append(expert)
        if before is not None:
            rows, count = keep_rows(before[rank].experts, homes[rank], replicas[rank]), len(homes[rank])
            homes[rank], replicas[rank] = rows[:count], rows[count:]
    home_rank = {e: rank for rank, experts in enumerate(homes) for e in experts}
    result = []
    for rank, experts in enumerate(slots.tolist()):
        row = {e: i for i, e in enumerate(homes[rank] + replicas[rank])}
        row_of_slot = [row[e] if e >= 0 and e not in experts[:i] else -1 for i, e in enumerate(experts)]
        wanted = [[e for e in replicas[r] if home_rank[e] == rank] for r in range(num_ranks)]
        offered = [[e for e in replicas[rank] if home_rank[e] == r] for r in range(num_ranks)]
        result.append(
            Residence(
                homes=tuple(homes[rank]),
                replicas=tuple(replicas[rank]),
                row_of_slot=tuple(row_of_slot),
                outgoing=tuple(homes[rank].index(e) for experts in wanted for e in experts),
                incoming=tuple(replicas[rank].index(e) for experts in offered for e in experts),
                sent=[len(experts) for experts in wanted],
                got=[len(experts) for experts in offered],
            )
        )
    return result
