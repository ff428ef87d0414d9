"""Token copies beside shared experts, drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def draw_copies(
    seed: int, tokens: int, top_k: int, num_shared: int, ranks: int, routed_per_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, weights and shared ranks with absent copies, whole absent tokens and tokens without a shared rank."""
    rng = np.random.default_rng([seed, tokens, top_k, num_shared, ranks])
    slots = rng.integers(0, ranks * routed_per_rank, (tokens, top_k))
    slots[rng.random(slots.shape) < 0.2] = -1
    slots[rng.random(tokens) < 0.2] = -1
    shared = rng.integers(-1, ranks, (tokens, num_shared)).astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    return torch.from_numpy(slots), torch.from_numpy(weights), torch.from_numpy(shared)
