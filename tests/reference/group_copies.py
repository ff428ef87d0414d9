"""group_copies: a stable sort of copies by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.results import Grouping


def group_copies(slots: Tensor, first: int, num_slots: int, num_places: int | None = None) -> Grouping:
    """The places of the copies of ``num_slots`` slots from slots [N, K]; C places, the tail of copy 0 and slot S-1."""
    flat = slots.flatten().tolist()
    places = len(flat) if num_places is None else num_places
    by_slot: list[list[int]] = [[] for _ in range(num_slots)]
    for copy, slot in enumerate(flat):
        if first <= slot < first + num_slots:
            by_slot[slot - first].append(copy)
    copies: list[int] = []
    of: list[int] = []
    ends, position = [], [places] * len(flat)
    for slot, members in enumerate(by_slot):
        for copy in members:
            position[copy] = len(copies)
            copies.append(copy)
            of.append(slot)
        ends.append(len(copies))
    if len(copies) > places:
        raise ValueError(f"num_places must be at least {len(copies)}, got {places}")
    tail = places - len(copies)
    assert sorted(p for p in position if p < places) == list(range(len(copies))), "every place is taken once"
    return Grouping(
        torch.tensor(copies + [0] * tail, dtype=torch.int64),
        torch.tensor(of + [max(num_slots - 1, 0)] * tail, dtype=torch.int64),
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor(position, dtype=torch.int64).view(slots.shape),
    )
