"""What the references that fill spare slots by a forecast share: who holds what, room, and what was borrowed."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.results import SlotFill


class SpareFill:
    """One layer's slots while they are filled; lists, ranks and experts by number."""

    def __init__(
        self, slots: Tensor, home: Tensor, num_ranks: int, spare_slots: int, alive: Tensor | None
    ) -> None:
        self.slots, self.home, self.num_ranks = slots.tolist(), home.tolist(), num_ranks
        self.size, self.spare = len(self.slots) // num_ranks, spare_slots
        self.alive = [True] * num_ranks if alive is None else alive.tolist()
        self.held = [
            set(self.slots[r * self.size : (r + 1) * self.size]) & set(range(len(self.home)))
            for r in range(num_ranks)
        ]

    def owner(self, expert: int) -> int:
        """The rank of its home slot."""
        return int(self.home[expert]) // self.size

    def empty(self, rank: int) -> list[int]:
        """Slots that the rank may fill."""
        if not self.alive[rank]:
            return []
        end = (rank + 1) * self.size
        return [p for p in range(end - self.spare, end) if self.slots[p] < 0]

    def taker(self, expert: int, load: list[int], node: int) -> int | None:
        """The least loaded rank with room that lacks the expert, in the node of its home slot (of `node` ranks)."""
        near = [r for r in range(self.num_ranks) if r // node == self.owner(expert) // node]
        open_ = [r for r in near if self.empty(r) and expert not in self.held[r]]
        return min(open_, key=lambda r: (load[r], r), default=None)

    def place(self, rank: int, expert: int) -> None:
        assert expert not in self.held[rank], "no expert comes twice to a rank"
        self.slots[self.empty(rank)[0]] = expert
        self.held[rank].add(expert)

    def result(self, ranks_per_node: int | None) -> SlotFill:
        per_node = ranks_per_node or self.num_ranks
        borrowed = [
            (p // self.size, self.owner(e))
            for p, e in enumerate(self.slots)
            if p % self.size >= self.size - self.spare and 0 <= e < len(self.home)
        ]
        takers, givers = ([pair[i] for pair in borrowed] for i in (0, 1))
        ranks = range(self.num_ranks)
        telemetry = [
            len(borrowed),
            max(takers.count(r) for r in ranks),
            max(givers.count(r) for r in ranks),
            sum(taker // per_node != giver // per_node for taker, giver in borrowed),
            0,
        ]
        return SlotFill(*(torch.tensor(x, dtype=torch.int32) for x in (self.slots, telemetry)))


def fixed_copies(fixed: Tensor | None, num_ranks: int) -> list[int]:
    return [0] * num_ranks if fixed is None else list(fixed.tolist())


def pick(tensor: Tensor | None, layer: int) -> Tensor | None:
    return None if tensor is None else tensor[layer]
