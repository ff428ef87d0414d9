"""Random problems of the planners that fill spare slots by a forecast, and Libra's algorithms as matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isoload import ops

Rng = np.random.Generator


@dataclass
class FillCase:
    """One layer: slots [P] int32 (-1 in spare ones), home [E], loads [R, E], fixed [R] or None, alive [R] or None."""

    name: str
    num_ranks: int
    spare: int
    slots: np.ndarray
    home: np.ndarray
    loads: np.ndarray
    fixed: np.ndarray | None = None
    alive: np.ndarray | None = None

    @property
    def size(self) -> int:
        return len(self.slots) // self.num_ranks

    @property
    def owner(self) -> np.ndarray:
        return self.home // self.size

    def arguments(self) -> tuple[Any, ...]:
        slots, home = torch.from_numpy(self.slots), torch.from_numpy(self.home)
        return torch.from_numpy(self.loads), slots, home, self.num_ranks, self.spare, self.fixed_tensor()

    def fixed_tensor(self) -> torch.Tensor | None:
        return None if self.fixed is None else torch.from_numpy(self.fixed)

    def alive_tensor(self) -> torch.Tensor | None:
        return None if self.alive is None else torch.from_numpy(self.alive)

    def live(self) -> np.ndarray:
        return np.ones(self.num_ranks, bool) if self.alive is None else self.alive

    def besides(self) -> np.ndarray:
        return np.zeros(self.num_ranks, np.int64) if self.fixed is None else self.fixed.astype(np.int64)

    def mean(self) -> int:
        """B: the load of a live rank if all were equal, rounded up."""
        return -(-int(self.loads.sum(dtype=np.int64) + self.besides().sum()) // int(self.live().sum()))

    def holds(self, slots: np.ndarray | None = None) -> np.ndarray:
        """[R, E] bool: the mapping of the paper."""
        rows = (self.slots if slots is None else slots).reshape(self.num_ranks, -1)
        return np.stack([np.isin(np.arange(len(self.home)), row) for row in rows])

    def tables(self, slots: np.ndarray | None = None) -> Any:
        held = torch.from_numpy(self.slots if slots is None else slots)
        return ops.replica_tables(held, self.num_ranks, len(self.home))

    def fill_at_random(self, rng: Rng) -> np.ndarray:
        """[P] slots with some of the spare ones filled, from the first on, as a fill before would."""
        slots, holds = self.slots.copy(), self.holds()
        for rank in np.flatnonzero(self.live()):
            lacking = rng.permutation(np.flatnonzero(~holds[rank]))[: rng.integers(self.spare + 1)]
            first = (rank + 1) * self.size - self.spare
            slots[first : first + len(lacking)] = lacking
        return slots


def draw_fill(rng: Rng, name: str = "") -> FillCase:
    ranks, spare = int(rng.integers(1, 10)), int(rng.integers(0, 5))
    experts = int(rng.integers(1, 5)) * ranks + int(rng.integers(0, 3))
    dead = rng.random(ranks) < 0.2 if rng.random() < 0.3 else np.zeros(ranks, bool)
    dead[rng.integers(ranks)] = False
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert, rank in enumerate(rng.permutation(np.resize(np.flatnonzero(~dead), experts))):
        held[rank].append(expert)
    if rng.random() < 0.5:  # replicas beside the homes
        for expert in rng.integers(experts, size=int(rng.integers(1, ranks + 1))):
            rank = int(rng.choice(np.flatnonzero(~dead)))
            if expert not in held[rank]:
                held[rank].append(int(expert))
    size = max(map(len, held)) + spare + int(rng.integers(0, 2))
    slots = np.full((ranks, size), -1, np.int32)
    for row, own in zip(slots, held, strict=True):
        row[: len(own)] = rng.permutation(own)
    flat = slots.ravel()
    home = np.array([rng.choice(np.flatnonzero(flat == e)) for e in range(experts)], np.int32)
    popularity = rng.dirichlet(np.full(experts, rng.choice([0.1, 0.5, 5])), size=ranks)
    tokens = rng.integers(0, int(rng.choice([8, 100, 5000])), ranks)
    loads = np.stack([rng.multinomial(n, p) for n, p in zip(tokens, popularity, strict=True)])
    fixed = rng.integers(0, 50, ranks).astype(np.int32) if rng.random() < 0.3 else None
    return FillCase(
        name, ranks, spare, flat, home, loads.astype(np.int32), fixed, ~dead if dead.any() else None
    )


def fill_cases(count: int, seed: int) -> Iterator[FillCase]:
    rng = np.random.default_rng(seed)
    return (draw_fill(rng, f"{seed}/{i}") for i in range(count))


def one_expert_each(loads: list[list[int]], spare: int) -> FillCase:
    """Expert r lives on rank r, with loads [R, R]."""
    ranks = len(loads)
    slots = np.full((ranks, 1 + spare), -1, np.int32)
    slots[:, 0] = np.arange(ranks)
    home = (np.arange(ranks) * (1 + spare)).astype(np.int32)
    return FillCase("one each", ranks, spare, slots.ravel(), home, np.array(loads, np.int32))


def algorithm_1(case: FillCase, local: int, rounds: int | None = None) -> np.ndarray:
    """[R, E] bool M_next of the paper's Algorithm 1, line by line; rounds of the second phase, None = its own."""
    mapping, loads = case.holds(), case.loads.astype(np.int64)
    ranks, experts = mapping.shape
    extra = np.zeros(ranks, int)
    for g in np.flatnonzero(case.live()):  # lines 3 to 6
        ask = np.where(mapping[g], 0, loads[g])
        for e in np.argsort(-ask, kind="stable")[:local]:
            if ask[e] > 0:
                mapping[g, e], extra[g] = True, extra[g] + 1
    for _ in range((case.spare - local) * ranks if rounds is None else rounds):  # lines 9 to 19
        load, remote = loads_of(case, mapping)
        source = int(np.argmax(load))
        if load[source] <= case.mean():
            break
        own = np.flatnonzero((case.owner == source) & (remote > 0))
        if not len(own):
            break
        e = min(own, key=lambda e: (-remote[e], case.home[e]))
        open_ = case.live() & ~mapping[:, e] & (extra < case.spare)
        if not open_.any():
            break
        to = min(np.flatnonzero(open_), key=lambda g: (load[g], g))
        if load[to] + loads[to, e] > case.mean():
            break  # nothing changes, so all further rounds meet the same refusal
        mapping[to, e], extra[to] = True, extra[to] + 1
    return mapping


def loads_of(case: FillCase, mapping: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[R] loads, and [E] copies sent to each expert's home, if copies go to their own rank or home."""
    remote = np.where(mapping, 0, case.loads).sum(0, dtype=np.int64)
    load = case.besides() + np.where(mapping, case.loads, 0).sum(1, dtype=np.int64)
    np.add.at(load, case.owner, remote)
    return load, remote


def algorithm_2(case: FillCase, mapping: np.ndarray, epsilon: float) -> np.ndarray:
    """[R, E] copies per rank and expert by the paper's Algorithm 2, line by line, where each transfer begins anew."""
    local = np.where(mapping, case.loads, 0).astype(np.int64)
    remote = np.zeros_like(local)  # R of the paper
    remote[case.owner, np.arange(len(case.owner))] = np.where(mapping, 0, case.loads).sum(0)
    mean = case.mean()
    while True:
        load = case.besides() + local.sum(1) + remote.sum(1)
        if load.max() <= (1 + epsilon) * mean or not transfer(remote, load, mapping, mean, case.home):
            return local + remote


def transfer(remote: np.ndarray, load: np.ndarray, mapping: np.ndarray, mean: int, home: np.ndarray) -> bool:
    for source in np.argsort(-load, kind="stable"):
        if load[source] <= mean:
            return False
        for e in sorted(np.flatnonzero(remote[source]), key=lambda e: (-remote[source, e], home[e])):
            others = [g for g in np.flatnonzero(mapping[:, e]) if g != source]
            to = min(others, key=lambda g: (load[g], g), default=source)
            room = mean - load[to]
            if room > 0:
                amount = min(remote[source, e], room)
                remote[source, e] -= amount
                remote[to, e] += amount
                return True
    return False


def check_fill(case: FillCase, before: np.ndarray, fill: ops.SlotFill) -> None:
    """What every fill keeps, and that its telemetry counts what it did; a node is half of the ranks."""
    after, first = fill.slot_to_expert.numpy(), case.size - case.spare
    place = np.arange(len(after)) % case.size
    kept = (before >= 0) | (place < first)
    assert np.array_equal(after[kept], before[kept]), f"{case.name}: what was there stays"
    imports, exports, across = np.zeros(case.num_ranks, int), np.zeros(case.num_ranks, int), 0
    for p in np.flatnonzero((place >= first) & (after >= 0)):
        rank, owner = p // case.size, case.owner[after[p]]
        imports[rank] += 1
        exports[owner] += 1
        across += nodes(case)[rank] != nodes(case)[owner]
        if before[p] < 0:
            assert case.live()[rank], f"{case.name}: a dead rank borrows"
            row = after[rank * case.size : (rank + 1) * case.size]
            assert (row == after[p]).sum() == 1, f"{case.name}: an expert is borrowed where it is"
    assert fill.telemetry.tolist() == [imports.sum(), imports.max(), exports.max(), across, 0], case.name


def per_node(case: FillCase) -> int:
    return case.num_ranks if case.num_ranks % 2 else case.num_ranks // 2


def nodes(case: FillCase) -> np.ndarray:
    return np.arange(case.num_ranks) // per_node(case)
