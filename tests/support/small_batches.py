"""A placement of three layers on eight ranks, and batches for it."""

from __future__ import annotations

import torch
from torch import Tensor

import isoload

RANKS, EXPERTS, LAYERS, K = 8, 32, 3, 4


def make_topology() -> isoload.Topology:
    return isoload.Topology(num_ranks=RANKS, ranks_per_node=4)


def make_counts() -> Tensor:
    """[L, E] skewed copies."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 900, (LAYERS, EXPERTS), generator=generator) ** 2 // 500


def make_placement() -> isoload.Placement:
    return isoload.place(make_counts(), make_topology(), slots_per_rank=6)


def draw_ids(seed: int, tokens: int = 37) -> list[Tensor]:
    """[R][T, K] distinct experts per token, skewed, a few masked."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(EXPERTS, generator=generator) ** 3 + 1e-3
    ids = torch.multinomial(weights.expand(RANKS * tokens, -1), K, generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.05] = -1
    return list(ids.view(RANKS, tokens, K))


def gather(ids: list[Tensor]) -> Tensor:
    return torch.stack([isoload.count(row, EXPERTS) for row in ids])
