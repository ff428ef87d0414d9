"""borrow, borrow_backward: rows of borrowed experts from home and back.

Python follows no addresses: peers are the stacks themselves, [R][W].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def borrow(
    slot_to_expert: Tensor,
    home: Tensor,
    peers: Sequence[Sequence[Tensor]],
    spare: Sequence[Tensor],
    num_ranks: int,
    rank: int,
) -> None:
    """Fills the rows of ``spare`` [W][spare_slots, ...] whose slots hold an expert from the stacks of its home."""
    for r, j, home_rank, row in _borrowed(slot_to_expert, home, num_ranks, len(spare[0])):
        if r == rank:
            for pool, stack in zip(spare, peers[home_rank], strict=True):
                pool[j].copy_(stack[row])


def borrow_backward(
    slot_to_expert: Tensor,
    home: Tensor,
    peers: Sequence[Sequence[Tensor]],
    totals: Sequence[Tensor],
    num_ranks: int,
    rank: int,
    spare_slots: int,
) -> None:
    """Adds the gradient pools' rows of experts at home on ``rank`` to ``totals`` [W][homes, ...], rounding once."""
    wide = torch.promote_types(totals[0].dtype, torch.float32)
    sums = [total.to(wide) for total in totals]
    for r, j, home_rank, row in _borrowed(slot_to_expert, home, num_ranks, spare_slots):
        if home_rank == rank:
            for total, pool in zip(sums, peers[r], strict=True):
                total[row] += pool[j].to(wide)
    for total, exact in zip(totals, sums, strict=True):
        total.copy_(exact)


def _borrowed(
    slot_to_expert: Tensor, home: Tensor, num_ranks: int, spare_slots: int
) -> Iterator[tuple[int, int, int, int]]:
    """Borrowing rank, spare slot on it, home rank and home row of every borrowed expert, by rank, then slot."""
    size = len(slot_to_expert) // num_ranks
    for r, slots in enumerate(slot_to_expert.view(num_ranks, size).tolist()):
        for j, expert in enumerate(slots[size - spare_slots :]):
            if expert >= 0:
                home_rank, row = home[expert].tolist()
                assert 0 <= home_rank < num_ranks and row >= 0, "a borrowed expert has a home"
                yield r, j, home_rank, row
