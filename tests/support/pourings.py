"""Named families of pouring problems, and routed batches of tokens whose shared copies are to be poured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload import ops

Rng = np.random.Generator
RANKS = (1, 2, 3, 5, 6, 8, 12, 16)


@dataclass(frozen=True)
class Pouring:
    """copies [R, R], tokens [R] int64 and the other arguments of plan_waterfill."""

    name: str
    copies: np.ndarray
    tokens: np.ndarray
    per_token: int
    per_node: int
    ticks: np.ndarray | None = None
    limits: np.ndarray | None = None

    @property
    def base(self) -> np.ndarray:
        return self.copies.sum(0)

    @property
    def own(self) -> np.ndarray:
        return self.per_token * self.tokens

    @property
    def visits(self) -> np.ndarray:
        """[R, R] copies that find a token which goes there anyway; none at home."""
        most = self.per_token * np.minimum(self.tokens[:, None], self.copies)
        return np.where(np.eye(len(most), dtype=bool), 0, most)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def int32(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values.astype(np.int32))

        options = {"ticks": int32(self.ticks), "limits": int32(self.limits)}
        return (int32(self.copies), int32(self.tokens), self.per_token, self.per_node), options


def even(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.integers(0, 40, (ranks, ranks)), rng.integers(0, 60, ranks)


def hot(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """A few ranks get most routed copies."""
    return rng.multinomial(rng.integers(0, 300, ranks), rng.dirichlet(np.full(ranks, 0.3))), rng.integers(
        0, 60, ranks
    )


def neighbours(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Every source visits few ranks, so that who goes where matters."""
    apart = (np.arange(ranks) - np.arange(ranks)[:, None]) % ranks
    copies = rng.integers(0, 30, (ranks, ranks)) * (apart <= 3) * rng.integers(0, 2, (ranks, ranks))
    return copies, rng.integers(0, 40, ranks) * rng.integers(0, 2, ranks)


def contended(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Even ranks are full, odd ones have about enough room for their tokens, and each source visits few."""
    odd, rank = np.arange(ranks) % 2 == 1, np.arange(ranks)
    near = odd & ((abs(rank - rank[:, None]) == 1) | (rng.random((ranks, ranks)) < 1 / ranks))
    copies = rng.integers(0, 80, (ranks, ranks)) * near
    room = rng.integers(0, 40, ranks) * odd
    copies[rank, rank] += (copies.sum(0) + room).max() - copies.sum(0) - room
    return copies, rng.integers(0, 30, ranks) * ~odd


def no_tokens(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return even(rng, ranks)[0], np.zeros(ranks, dtype=np.int64)


def not_routed(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((ranks, ranks), dtype=np.int64), rng.integers(0, 60, ranks)


def one_source(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    copies, tokens = np.zeros((ranks, ranks), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    source = rng.integers(ranks)
    tokens[source] = rng.integers(1, 200)
    copies[source] = rng.multinomial(8 * tokens[source], rng.dirichlet(np.ones(ranks)))
    return copies, tokens


def one_token(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    copies, tokens = one_source(rng, ranks)
    return np.minimum(copies, 1), np.minimum(tokens, 1)


def uneven(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """As many tokens everywhere and a few cold ranks: no more room than shared copies, and hardly more visits."""
    tokens, popularity = rng.integers(50, 400), 1 - rng.uniform(0.3, 0.5) * rng.random(ranks) ** 6
    taste = popularity * rng.lognormal(0, 0.3, (ranks, ranks))
    taste *= popularity / taste.sum(0)
    copies = np.stack([rng.multinomial(8 * tokens, row / row.sum()) for row in taste])
    return copies, np.full(ranks, tokens)


FAMILIES: dict[str, Callable[[Rng, int], tuple[np.ndarray, np.ndarray]]] = {
    build.__name__: build
    for build in (even, hot, neighbours, contended, no_tokens, not_routed, one_source, one_token, uneven)
}


def draw(family: str, ranks: int, seed: int) -> Pouring:
    """One problem; its name tells how to draw it again. Limits always hold all shared copies."""
    rng = np.random.default_rng([list(FAMILIES).index(family), ranks, seed])
    copies, tokens = FAMILIES[family](rng, ranks)
    per_node = int(rng.choice([d for d in range(1, ranks + 1) if ranks % d == 0]))
    per_token = int(rng.choice([1, 1, 2, 3]))
    ticks = limits = None
    if seed % 3 == 1:
        ticks = rng.integers(1, int(rng.choice([3, 20])), ranks)
    if seed % 2 == 1:
        limits = rng.multinomial(per_token * int(tokens.sum()), rng.dirichlet(np.ones(ranks)))
        limits = limits + rng.integers(0, 30, ranks) * rng.integers(0, 2)
    return Pouring(f"{family}-R{ranks}#{seed}", copies, tokens, per_token, per_node, ticks, limits)


@dataclass(frozen=True)
class RoutedBatch:
    """slots [R, T, K] of every rank's tokens, S slots per rank."""

    slots: Tensor
    slots_per_rank: int

    @property
    def ranks(self) -> np.ndarray:
        """[R, T, K]"""
        return (self.slots // self.slots_per_rank).numpy()

    def copies(self) -> Tensor:
        """[R, R] int32"""
        num_ranks = len(self.slots)
        return torch.stack([ops.count(r, num_ranks).counts for r in self.slots // self.slots_per_rank])

    def visited(self) -> np.ndarray:
        """[R, T, R] whether a token has a routed copy on a rank."""
        source, token, _ = np.indices(self.ranks.shape)
        visited = np.zeros((*self.ranks.shape[:2], len(self.slots)), dtype=bool)
        visited[source, token, self.ranks] = True
        return visited


def route_batch(num_ranks: int, replicas: int, tokens: int, drift: float, seed: int) -> RoutedBatch:
    """256 experts, top-8 without repeats, Zipf 0.8; placed by eplb before the popularity drifts; exact split."""
    rng = np.random.default_rng([num_ranks, replicas, tokens, seed])
    zipf = rng.permutation(1 / np.arange(1, 257) ** 0.8)
    topology = isoload.Topology(num_ranks, 8 if num_ranks % 8 == 0 else num_ranks)
    placement = isoload.place(torch.from_numpy(zipf)[None], topology, (256 + replicas) // num_ranks)
    live = np.log(zipf) + drift * rng.standard_normal(256)
    scores = live + rng.gumbel(size=(num_ranks, tokens, 256))
    topk_ids = torch.from_numpy(np.argpartition(-scores, 8, -1)[..., :8].copy())
    loads = torch.stack([ops.count(ids, 256).counts for ids in topk_ids])
    plan = isoload.plan(loads, placement, 0, policy="exact")
    slots = [isoload.route(ids, loads, plan, rank=r) for r, ids in enumerate(topk_ids)]
    return RoutedBatch(torch.stack(slots), (256 + replicas) // num_ranks)
