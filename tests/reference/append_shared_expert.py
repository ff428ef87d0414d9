"""append_shared_expert: a column per shared expert, in slots that make room for it."""

from __future__ import annotations

import torch
from torch import Tensor


def append_shared_expert(
    slots: Tensor,
    weights: Tensor,
    ranks: Tensor,
    routed_per_rank: int,
    slots_per_rank: int | None = None,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Slots and weights [T, K + n] from slots and weights [T, K] and the shared copies' ranks [T, n].

    A rank's slots are its routed ones, then one per shared expert, then what slots_per_rank leaves empty. A copy
    without a slot, or of a token without any routed copy, is -1 and weighs 0.
    """
    n = ranks.shape[1]
    size = routed_per_rank + n if slots_per_rank is None else slots_per_rank
    new_slots, new_weights = [], []
    for token, gates, homes in zip(slots.tolist(), weights.tolist(), ranks.tolist(), strict=True):
        row, row_weights = [], []
        for p, gate in zip(token, gates, strict=True):
            rank, local = divmod(p, routed_per_rank)
            row.append(-1 if p == -1 else rank * size + local)
            row_weights.append(0.0 if p == -1 else gate)
        has_copies = any(p >= 0 for p in token)
        for j, home in enumerate(homes):
            placed = has_copies and home >= 0
            row.append(home * size + routed_per_rank + j if placed else -1)
            row_weights.append(weight if placed else 0.0)
        new_slots.append(row)
        new_weights.append(row_weights)
    shape = (slots.shape[0], slots.shape[1] + n)
    out = torch.tensor(new_slots, dtype=slots.dtype).view(shape)
    _check(slots, out, routed_per_rank, size)
    return out, torch.tensor(new_weights, dtype=weights.dtype).view(shape)


def _check(slots: Tensor, out: Tensor, routed_per_rank: int, size: int) -> None:
    routed, shared = out[:, : slots.shape[1]], out[:, slots.shape[1] :]
    present = slots >= 0
    assert torch.equal((routed // size)[present], (slots // routed_per_rank)[present]), "ranks are kept"
    assert bool((routed[present] % size < routed_per_rank).all()), "routed slots come first on a rank"
    assert bool((shared[shared >= 0] % size >= routed_per_rank).all()), "shared slots follow"
