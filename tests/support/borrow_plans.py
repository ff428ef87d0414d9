"""Plans that borrow, and the weights they borrow, drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Rows of a few odd sizes, of whole vectors of 16 bytes, and of several chunks of a CUDA block.
SHAPES = ((3,), (16,), (5, 7), (), (1025, 33), (64, 128), (0,), (2,), (1,))


@dataclass(frozen=True)
class Plan:
    """The slots of a batch and every expert's home; expert 0 has none. Ranks with and without experts."""

    slot_to_expert: Tensor  # [R * S] int32
    home: Tensor  # [E, 2] int32
    num_ranks: int
    spare_slots: int
    homes: tuple[int, ...]  # rows at home of every rank

    @property
    def args(self) -> tuple[Tensor, Tensor]:
        return self.slot_to_expert, self.home

    def spare(self, rank: int) -> list[int]:
        """The experts in a rank's spare slots."""
        size = len(self.slot_to_expert) // self.num_ranks
        return self.slot_to_expert.tolist()[(rank + 1) * size - self.spare_slots : (rank + 1) * size]


def draw_plan(rng: np.random.Generator, num_ranks: int, spare_slots: int) -> Plan:
    homes = rng.integers(0, 4, num_ranks)
    homes[rng.integers(num_ranks)] += 1
    where = [(r, row) for r, n in enumerate(homes) for row in rng.permutation(n)]
    home = np.array([(-1, -1), *(where[i] for i in rng.permutation(len(where)))], dtype=np.int32)
    slots = np.full((num_ranks, homes.max() + spare_slots), -1, dtype=np.int32)
    for expert, (r, _) in enumerate(home):
        if r >= 0:
            slots[r, np.flatnonzero(slots[r] < 0)[0]] = expert
    filled = slots[:, homes.max() :]
    filled[:] = rng.integers(1, len(home), filled.shape)
    filled[rng.random(filled.shape) < 0.3] = -1
    return Plan(
        torch.from_numpy(slots.ravel()), torch.from_numpy(home), num_ranks, spare_slots, tuple(homes.tolist())
    )


def draw_values(rng: np.random.Generator, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of very different size, so that another order of additions gives another sum."""
    values = rng.standard_normal((rows, *shape)) * 10.0 ** rng.integers(-4, 5, (rows, *shape))
    start = int(rng.integers(2))
    return (
        torch.empty(start + values.size, dtype=dtype)[start:]
        .view(rows, *shape)
        .copy_(torch.from_numpy(values))
    )
