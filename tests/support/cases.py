"""Named families of planning problems: ordinary, degenerate and extreme placements, with loads to match.

``instances(n, seed)`` draws n problems from every (family, number of ranks). A family carries a claim about
its problems, which tests/support/test_cases.py checks. The same seed gives the same problems on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from isoload import ops
from isoload.ops.tables import ReplicaTables

MAX_COPIES = 2**31 - 1
MANY_RANKS = (1, 2, 3, 7, 8, 12, 16, 31, 32, 48, 64, 65, 72, 96, 127, 128, 200, 300)
Rng = np.random.Generator
PerRank = list[list[int]]


@dataclass(frozen=True)
class Case:
    """One layer and batch: slot_to_expert [P] int32 (-1 = empty), loads [R, E] int32."""

    name: str
    slot_to_expert: np.ndarray
    loads: np.ndarray

    @property
    def num_ranks(self) -> int:
        return self.loads.shape[0]

    @property
    def num_experts(self) -> int:
        return self.loads.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return len(self.slot_to_expert) // self.num_ranks

    @property
    def total(self) -> int:
        return int(self.loads.sum(dtype=np.int64))

    def expert_loads(self) -> np.ndarray:
        """[E] int64, summed over the sources."""
        return self.loads.sum(0, dtype=np.int64)

    def tables(self) -> ReplicaTables:
        return ops.replica_tables(torch.from_numpy(self.slot_to_expert), self.num_ranks, self.num_experts)

    def rank_sets(self) -> list[set[int]]:
        """The ranks that hold each expert."""
        ranks: list[set[int]] = [set() for _ in range(self.num_experts)]
        for p, e in enumerate(self.slot_to_expert):
            if e >= 0:
                ranks[e].add(p // self.slots_per_rank)
        return ranks

    def split_sets(self) -> list[set[int]]:
        """The rank sets of experts that leave a choice."""
        return [ranks for ranks in self.rank_sets() if len(ranks) > 1]


@dataclass(frozen=True)
class Family:
    build: Callable[[Rng, int], tuple[np.ndarray, np.ndarray]]
    claim: Callable[[Case], bool]
    ranks: tuple[int, ...] = MANY_RANKS


def pack(per_rank: PerRank, slots_per_rank: int = 0) -> np.ndarray:
    """[P] from each rank's list of experts; shorter lists end in empty slots."""
    size = max(1, slots_per_rank, *(len(held) for held in per_rank))
    slots = np.full((len(per_rank), size), -1, dtype=np.int32)
    for r, held in enumerate(per_rank):
        slots[r, : len(held)] = held
    return slots.ravel()


def draw_loads(rng: Rng, popularity: np.ndarray, ranks: int, total: int | None = None) -> np.ndarray:
    """[R, E] int32 with the given total (random if None), drawn from a popularity [E] and uneven sources."""
    if total is None:
        total = int(rng.choice([ranks // 2, 4 * ranks, 1_000, 40_000, 3_000_000]) * rng.uniform(0.5, 1.5))
    per_expert = rng.multinomial(total, popularity / popularity.sum())
    sources = rng.dirichlet(np.full(ranks, 3.0))
    return rng.multinomial(per_expert, sources).T.astype(np.int32)


def popularity(rng: Rng, experts: int) -> np.ndarray:
    """[E] Zipf, lognormal or nearly equal, in random order."""
    kind = rng.integers(3)
    if kind == 0:
        return rng.permutation(1.0 / np.arange(1, experts + 1) ** rng.uniform(0.5, 1.5))
    return rng.lognormal(0.0, (0.0, 1.0, 0.05)[kind], experts)


def uniform(experts: int) -> np.ndarray:
    return np.ones(experts)


# Placements


def eplb_placement(rng: Rng, ranks: int, wished: np.ndarray, slots_per_rank: int) -> np.ndarray:
    """Replicas to the experts with most load per replica; heaviest first, to the emptiest rank without it."""
    copies = np.ones(len(wished), dtype=np.int64)
    for _ in range(ranks * slots_per_rank - len(wished)):
        copies[np.argmax(np.where(copies < ranks, wished / copies, -1.0))] += 1
    per_rank: PerRank = [[] for _ in range(ranks)]
    weight = np.zeros(ranks)  # infinite where no slot is free
    for e in sorted(range(len(wished)), key=lambda e: (-copies[e], -wished[e] / copies[e])):
        holds = np.zeros(ranks)
        for _ in range(copies[e]):
            r = int(np.argmin(weight + holds))
            per_rank[r].append(e)
            weight[r] = np.inf if len(per_rank[r]) == slots_per_rank else weight[r] + wished[e] / copies[e]
            holds[r] = 1e9
    return pack([list(rng.permutation(held)) for held in per_rank], slots_per_rank)


def eplb(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    slots_per_rank = int(rng.integers(2, 6))
    experts = ranks * slots_per_rank - (int(rng.integers(1, ranks + 1)) if ranks > 1 else 0)
    wished = popularity(rng, experts)
    drift = rng.lognormal(0.0, rng.choice([0.0, 0.5, 1.0]), experts)
    return eplb_placement(rng, ranks, wished, slots_per_rank), draw_loads(rng, wished * drift, ranks)


def random_slots(rng: Rng, ranks: int, slots_per_rank: int, experts: int) -> np.ndarray:
    """Every expert once, the other slots anyhow."""
    slots = rng.integers(0, experts, ranks * slots_per_rank)
    slots[:experts] = np.arange(experts)
    return rng.permutation(slots).astype(np.int32)


def random_placement(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    slots_per_rank = int(rng.integers(1, 6))
    experts = int(rng.integers(1, ranks * slots_per_rank + 1))
    return random_slots(rng, ranks, slots_per_rank, experts), draw_loads(rng, popularity(rng, experts), ranks)


def neighbours(rng: Rng, ranks: int, links: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert i on ranks i and i + 1 (mod R), a solo expert per rank; often all excess is on one rank."""
    per_rank: PerRank = [[links + r] for r in range(ranks)]
    for i in range(links):
        per_rank[i].append(i)
        per_rank[(i + 1) % ranks].append(i)
    weights = rng.uniform(0.9, 1.1, links + ranks)
    if rng.random() < 0.5:
        weights[links + int(rng.integers(ranks))] *= ranks
    return pack(per_rank), draw_loads(rng, weights, ranks)


def chain(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return neighbours(rng, ranks, ranks - 1)


def ring(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return neighbours(rng, ranks, ranks)


def clique(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    pairs = list(combinations(range(ranks), 2))
    per_rank: PerRank = [[e for e, pair in enumerate(pairs) if r in pair] for r in range(ranks)]
    return pack(per_rank), draw_loads(rng, popularity(rng, len(pairs)), ranks)


def duplicates(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Every rank holds its first expert twice; some of those experts have replicas elsewhere too."""
    experts = 2 * ranks
    per_rank: PerRank = [[r, ranks + r, r, int(rng.integers(experts))] for r in range(ranks)]
    return pack([list(rng.permutation(held)) for held in per_rank]), draw_loads(
        rng, popularity(rng, experts), ranks
    )


def one_rank(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Two replicas of every expert, both on one rank."""
    per_rank: PerRank = [[r, ranks + r, ranks + r, r] for r in range(ranks)]
    return pack(per_rank), draw_loads(rng, popularity(rng, 2 * ranks), ranks)


def zero_loads(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    slots, loads = random_placement(rng, ranks)
    return slots, np.zeros_like(loads)


def sparse_loads(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """A tenth of the experts have all the load."""
    slots, loads = eplb(rng, ranks)
    weights = np.zeros(loads.shape[1])
    weights[rng.permutation(len(weights))[: 1 + len(weights) // 10]] = 1.0
    return slots, draw_loads(rng, weights, ranks)


def one_expert(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    holders = rng.permutation(ranks)[: int(rng.integers(1, ranks + 1))]
    return pack([[0] if r in holders else [] for r in range(ranks)]), draw_loads(rng, uniform(1), ranks)


def no_replicas(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    experts = ranks * int(rng.integers(1, 4))
    return rng.permutation(experts).astype(np.int32), draw_loads(rng, popularity(rng, experts), ranks)


def doubled(rng: Rng, ranks: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Every expert on exactly two ranks."""
    per_rank: PerRank = [[] for _ in range(ranks)]
    shift = int(rng.integers(1, ranks))
    for e in range(experts):
        per_rank[e % ranks].append(e)
        per_rank[(e % ranks + 1 + (e // ranks + shift) % (ranks - 1)) % ranks].append(e)
    return pack(per_rank), draw_loads(rng, popularity(rng, experts), ranks)


def copies_128(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert 0 on 128 ranks, expert 1 on two of them, one solo expert per rank."""
    holders = set(rng.permutation(ranks)[:128].tolist())
    pair = sorted(holders)[:2]
    per_rank: PerRank = [[2 + r] + [0] * (r in holders) + [1] * (r in pair) for r in range(ranks)]
    weights = popularity(rng, ranks + 2)
    weights[0] = weights.sum() * rng.uniform(0.1, 1.0)
    return pack(per_rank), draw_loads(rng, weights, ranks)


def empty_slots(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Holes anywhere, but every expert keeps a slot."""
    slots, loads = random_placement(rng, ranks)
    wider = np.full(2 * len(slots), -1, dtype=np.int32)
    wider[np.sort(rng.permutation(len(wider))[: len(slots)])] = slots
    return wider, loads


def empty_ranks(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Every third rank has no expert at all."""
    some = [r for r in range(ranks) if r % 3 != 1]
    slots, loads = random_placement(rng, len(some))
    per_rank: PerRank = [[] for _ in range(ranks)]
    for r, held in zip(some, slots.reshape(len(some), -1).tolist(), strict=True):
        per_rank[r] = held
    return pack(per_rank), draw_loads(rng, popularity(rng, loads.shape[1]), ranks)


def spare_slots(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The last two slots of every rank are empty."""
    slots, loads = eplb(rng, ranks)
    return np.pad(slots.reshape(ranks, -1), ((0, 0), (0, 2)), constant_values=-1).ravel(), loads


def full_total(rng: Rng, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """2^31 - 1 copies, often nearly all for one expert."""
    slots, loads = eplb(rng, ranks) if rng.random() < 0.5 else random_placement(rng, ranks)
    weights = popularity(rng, loads.shape[1])
    if rng.random() < 0.5:
        weights[int(rng.integers(len(weights)))] += 50 * weights.sum()
    return slots, draw_loads(rng, weights, ranks, MAX_COPIES)


# What the families claim


def has_duplicates(case: Case) -> bool:
    held = case.slot_to_expert.reshape(case.num_ranks, -1)
    return any(len(row[row >= 0]) > len(set(row[row >= 0])) for row in held)


def _links(case: Case) -> list[tuple[int, ...]]:
    return sorted(tuple(sorted(ranks)) for ranks in case.split_sets())


def _is_chain(case: Case) -> bool:
    return _links(case) == [(r, r + 1) for r in range(case.num_ranks - 1)]


def _is_ring(case: Case) -> bool:
    return _links(case) == sorted([(r, r + 1) for r in range(case.num_ranks - 1)] + [(0, case.num_ranks - 1)])


def _empty_last(case: Case, slots: int) -> bool:
    held = case.slot_to_expert.reshape(case.num_ranks, -1)
    return bool((held[:, -slots:] < 0).all() and (held[:, :-slots] >= 0).all())


def _most_copies(case: Case) -> int:
    return max(len(ranks) for ranks in case.rank_sets())


FAMILIES: dict[str, Family] = {
    "eplb": Family(
        eplb, lambda c: bool((c.slot_to_expert >= 0).all() and (c.num_ranks == 1 or c.split_sets()))
    ),
    "random": Family(random_placement, lambda c: bool((c.slot_to_expert >= 0).all())),
    "chain": Family(chain, _is_chain, MANY_RANKS[1:]),
    "ring": Family(ring, _is_ring, MANY_RANKS[2:]),
    "clique": Family(
        clique, lambda c: len(_links(c)) == c.num_ranks * (c.num_ranks - 1) // 2, MANY_RANKS[1:9]
    ),
    "duplicates": Family(duplicates, has_duplicates),
    "one_rank": Family(one_rank, lambda c: has_duplicates(c) and not c.split_sets()),
    "zero_loads": Family(zero_loads, lambda c: c.total == 0),
    "sparse_loads": Family(sparse_loads, lambda c: (c.loads.sum(0) > 0).sum() <= 1 + c.num_experts // 10),
    "one_expert": Family(one_expert, lambda c: c.num_experts == 1),
    "no_replicas": Family(no_replicas, lambda c: _most_copies(c) == 1 and not has_duplicates(c)),
    "split_256": Family(
        lambda rng, ranks: doubled(rng, ranks, 256), lambda c: len(c.split_sets()) == 256, MANY_RANKS[1:-2]
    ),
    "split_512": Family(
        lambda rng, ranks: doubled(rng, ranks, 512),
        lambda c: len(c.split_sets()) == 512,
        (8, 16, 32, 64, 128),
    ),
    "copies_128": Family(copies_128, lambda c: _most_copies(c) == 128, (128, 200, 300)),
    "empty_slots": Family(empty_slots, lambda c: bool((c.slot_to_expert < 0).any())),
    "empty_ranks": Family(
        empty_ranks,
        lambda c: bool((c.slot_to_expert.reshape(c.num_ranks, -1) < 0).all(1).any()),
        MANY_RANKS[1:],
    ),
    "spare_slots": Family(spare_slots, lambda c: _empty_last(c, 2)),
    "full_total": Family(full_total, lambda c: c.total == MAX_COPIES),
}


def draw(family: str, ranks: int, seed: int) -> Case:
    """One problem; its name tells how to draw it again."""
    rng = np.random.default_rng([list(FAMILIES).index(family), ranks, seed])
    slots, loads = FAMILIES[family].build(rng, ranks)
    return Case(f"{family}-R{ranks}#{seed}", slots, loads)


def families_up_to(max_ranks: int) -> list[str]:
    """Those with problems of so few ranks."""
    return [name for name, family in FAMILIES.items() if min(family.ranks) <= max_ranks]


def instances(
    per_case: int,
    seed: int,
    max_ranks: int = MANY_RANKS[-1],
    families: tuple[str, ...] = tuple(FAMILIES),
    every: int = 4,
) -> Iterator[Case]:
    """``per_case`` problems of every family and of each ``every``-th number of ranks up to ``max_ranks``: by its seed
    and by a family's place, each sweep begins with another."""
    for place, family in enumerate(families, seed):
        sizes = [ranks for ranks in FAMILIES[family].ranks if ranks <= max_ranks]
        step = min(every, max(1, len(sizes)))
        for ranks in sizes[place % step :: step]:
            for i in range(per_case):
                yield draw(family, ranks, seed + i)
