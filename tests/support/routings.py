"""Routed slots of a batch with shared experts, drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Rng = np.random.Generator


RANKS = (1, 2, 3, 8, 12, 65)


TOKENS = (0, 1, 7, 63, 64, 65, 130)


def draw_slots(rng: Rng, ranks: int, tokens: int) -> tuple[Tensor, int]:
    """[T, K] int32 or int64 slots of skewed popularity, some -1, and S."""
    slots_per_rank, k = int(rng.integers(1, 4)), int(rng.integers(1, 9))
    popularity = rng.dirichlet(np.full(ranks * slots_per_rank, rng.choice([0.3, 3.0])))
    slots = rng.choice(len(popularity), (tokens, k), p=popularity)
    slots[rng.random((tokens, k)) < rng.choice([0.0, 0.3, 0.8])] = -1
    return torch.from_numpy(slots.astype(rng.choice([np.int32, np.int64]))), slots_per_rank


def draw_row(rng: Rng, ranks: int, copies: int) -> Tensor:
    parts = rng.dirichlet(np.full(ranks, rng.choice([0.1, 1.0])))
    return torch.from_numpy(rng.multinomial(copies, parts).astype(np.int32))


def routings(seed: int, num_shared: int = 1) -> Any:
    """(slots, source_quota, S, rank) of every size."""
    rng = np.random.default_rng([seed, num_shared])
    for ranks in RANKS:
        for tokens in TOKENS:
            slots, slots_per_rank = draw_slots(rng, ranks, tokens)
            present = int((slots >= 0).any(1).sum())
            row = draw_row(rng, ranks, num_shared * present)
            yield slots, row, slots_per_rank, int(rng.integers(ranks))
