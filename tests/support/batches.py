"""Batches that all ranks hand to a dispatcher, from a fixed seed in every process, and what each rank must get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

MAX_TOKENS = 13  # of a rank in any batch
TOP_KS = (1, 3, 8)  # beside 4, which the other batches have


@dataclass(frozen=True)
class Batch:
    """What all R ranks hand over: x [R][T, H], slots [R][T, K] global, weights [R][T, K], S slots per rank."""

    name: str
    x: list[Tensor]
    slots: list[Tensor]
    weights: list[Tensor]
    slots_per_rank: int

    def received_by(self, rank: int) -> list[tuple[int, int, list[int], list[float]]]:
        """Of every row that a rank must get, in order: source, token, local slots [K], weights [K]."""
        rows = []
        for source, slots in enumerate(self.slots):
            for token, chosen in enumerate(slots.tolist()):
                here = [slot >= 0 and slot // self.slots_per_rank == rank for slot in chosen]
                if any(here):
                    local = [
                        slot % self.slots_per_rank if h else -1 for slot, h in zip(chosen, here, strict=True)
                    ]
                    kept = [
                        w if h else 0.0
                        for w, h in zip(self.weights[source][token].tolist(), here, strict=True)
                    ]
                    rows.append((source, token, local, kept))
        return rows

    def num_rows(self) -> np.ndarray:
        """[R, R] distinct (token, destination) pairs by source."""
        counts = np.zeros((len(self.x), len(self.x)), dtype=np.int64)
        for destination in range(len(self.x)):
            for source, *_ in self.received_by(destination):
                counts[source, destination] += 1
        return counts

    def hop_rows(self, per_node: int) -> tuple[np.ndarray, np.ndarray]:
        """[R, R] rows that go to leaders, one per token and node, and those that leaders hand on inside of a node."""
        across, inside = (np.zeros((len(self.x), len(self.x)), dtype=np.int64) for _ in range(2))
        for source, slots in enumerate(self.slots):
            for chosen in slots.tolist():
                ranks = {slot // self.slots_per_rank for slot in chosen if slot >= 0}
                for node in {rank // per_node for rank in ranks}:
                    across[source, node * per_node + source % per_node] += 1
                for rank in ranks:
                    inside[rank // per_node * per_node + source % per_node, rank] += 1
        return across, inside

    def without_own_copies(self) -> Batch:
        """The batch where copies on the token's own rank are absent: what a two-stage execution dispatches."""
        here = [s.div(self.slots_per_rank, rounding_mode="floor") == r for r, s in enumerate(self.slots)]
        slots = [s.masked_fill(h, -1) for s, h in zip(self.slots, here, strict=True)]
        return Batch(self.name, self.x, slots, self.weights, self.slots_per_rank)


def draw(
    name: str,
    num_ranks: int,
    *,
    top_k: int = 4,
    hidden: int = 7,
    width: int = 1,
    tokens: list[int] | None = None,
    absent: float = 0.15,
    to_rank: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Batch:
    """Distinct slots per token (all on one rank if ``to_rank`` is given), some absent; ragged token numbers.

    H is hidden * width.
    """
    rng = np.random.default_rng([seed, num_ranks, top_k, hidden])
    slots_per_rank = top_k + 1 if to_rank is not None else 2 + top_k // num_ranks
    tokens = [int(t) for t in rng.integers(1, MAX_TOKENS + 1, num_ranks)] if tokens is None else tokens
    low, high = (0, num_ranks) if to_rank is None else (to_rank, to_rank + 1)
    x, slots, weights = [], [], []
    for count in tokens:
        held = np.arange(low * slots_per_rank, high * slots_per_rank)
        chosen = np.array([rng.permutation(held)[:top_k] for _ in range(count)], dtype=np.int64)
        chosen = chosen.reshape(count, top_k)
        chosen[rng.random(chosen.shape) < absent] = -1
        slots.append(torch.from_numpy(chosen))
        x.append(torch.from_numpy(rng.standard_normal((count, hidden * width))).to(dtype))
        weights.append(torch.from_numpy(rng.random((count, top_k))).float())
    return Batch(name, x, slots, weights, slots_per_rank)


def batches(num_ranks: int, dtype: torch.dtype = torch.float64, width: int = 1) -> Iterator[Batch]:
    """The named batches of every case, of hidden sizes that are multiples of a width."""
    last = num_ranks - 1
    make = partial(draw, num_ranks=num_ranks, dtype=dtype, width=width)
    yield make("one token on one rank", tokens=[1] + [0] * last)
    yield make("no token anywhere", tokens=[0] * num_ranks)
    yield make("rank without tokens", tokens=[MAX_TOKENS] * last + [0])
    yield make("all copies absent", absent=1.0)
    yield make("all copies to the last rank", to_rank=last)
    yield make("no copy absent", absent=0.0)
    yield make("smallest H", hidden=1)
    yield make("31 times that", hidden=31)  # the most of DeepEP's Buffer, in 256s
    for top_k in TOP_KS:
        yield make(f"K = {top_k}", top_k=top_k, seed=top_k)
