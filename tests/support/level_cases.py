"""Random and named problems of plan_fill, and what every fill promises, checked from the placement alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isoload import ops

Rng = np.random.Generator


@dataclass
class LevelCase:
    """One layer and batch: slots [P] int32 (-1 in spare ones), home [E], loads [E], fixed [R], alive [R], start [P]."""

    name: str
    num_ranks: int
    spare: int
    slots: np.ndarray
    home: np.ndarray
    loads: np.ndarray
    fixed: np.ndarray | None = None
    alive: np.ndarray | None = None
    start: np.ndarray | None = None
    rules: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.slots) // self.num_ranks

    def arguments(self) -> tuple[Any, ...]:
        fixed = None if self.fixed is None else torch.from_numpy(self.fixed)
        slots, home = torch.from_numpy(self.slots), torch.from_numpy(self.home)
        return torch.from_numpy(self.loads), slots, home, self.num_ranks, self.spare, fixed

    def options(self) -> dict[str, Any]:
        given = {"alive": self.alive, "start": self.start}
        return {**self.rules, **{k: None if v is None else torch.from_numpy(v) for k, v in given.items()}}

    def fill(self, planner: Any = ops.plan_fill, **rules: Any) -> ops.SlotFill:
        return planner(*self.arguments(), **{**self.options(), **rules})

    def exact(self, filled: torch.Tensor) -> ops.ExactSplit:
        """The exact split over filled slots."""
        loads, _, _, ranks, _, fixed = self.arguments()
        return ops.plan_exact(loads, ops.replica_tables(filled, ranks, len(loads)), fixed)

    def peak(self, filled: torch.Tensor) -> int:
        return int(self.exact(filled).peak)

    def plain(self) -> np.ndarray:
        """[R] int64 loads before anything is lent: as `start` has it, else of plain EP."""
        load = np.zeros(self.num_ranks, np.int64) if self.fixed is None else self.fixed.astype(np.int64)
        if self.start is not None:
            return load + self.start.reshape(self.num_ranks, -1).sum(1)
        np.add.at(load, self.home // self.size, self.loads)
        return load

    def live(self) -> int:
        return self.num_ranks if self.alive is None else int(self.alive.sum())

    def split_exactly(self) -> LevelCase:
        """Starts from the exact split over the resident replicas."""
        self.start = self.exact(torch.from_numpy(self.slots)).quota.numpy()
        return self

    def capacity(self, factor: float) -> int:
        """Of a rank: from the mean of the live ranks, or of the most loaded node's if experts stay there."""
        size = (self.rules.get("ranks_per_node") or self.num_ranks) if self.within_node() else self.num_ranks
        alive = np.ones(self.num_ranks, bool) if self.alive is None else self.alive
        groups = zip(self.plain().reshape(-1, size).sum(1), alive.reshape(-1, size).sum(1), strict=True)
        return max(-(-int(n) * round(factor * 1e6) // (10**6 * int(live))) for n, live in groups if live)

    def within_node(self) -> bool:
        return self.rules.get("within") == "node"


def in_order(loads: Any, ranks: int, spare: int = 4, name: str = "in order", **rules: Any) -> LevelCase:
    """E / R experts per rank, one replica each, spare slots after them."""
    loads = np.asarray(loads, np.int32)
    per_rank = len(loads) // ranks
    slots = np.full((ranks, per_rank + spare), -1, np.int32)
    slots[:, :per_rank] = np.arange(len(loads)).reshape(ranks, per_rank)
    home = np.flatnonzero(slots.ravel() >= 0).astype(np.int32)
    return LevelCase(name, ranks, spare, slots.ravel(), home, loads, rules=rules)


def draw_loads(rng: Rng, experts: int, total: int) -> np.ndarray:
    """[E] int32: equal, log-normal, Zipf, all in one expert, or few large ones."""
    weights = (
        np.ones(experts),
        rng.lognormal(0, 1.5, experts),
        rng.permutation(1 / np.arange(1, experts + 1) ** 1.2),
        np.eye(experts)[rng.integers(experts)],
        rng.random(experts) ** 4 + 1e-9,
    )[rng.integers(5)]
    return rng.multinomial(total, weights / weights.sum()).astype(np.int32)


def draw(seed: int) -> LevelCase:
    """Ragged ranks, empty ones, replicas, shared copies, dead ranks, and any rules."""
    rng = np.random.default_rng([7, seed])
    ranks = int(rng.choice([1, 2, 3, 4, 8, 12]))
    experts, spare = int(rng.integers(1, ranks * 6 + 1)), int(rng.integers(0, 4))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for e in range(experts):
        held[rng.integers(ranks)].append(e)
    home_rank = [next(r for r in range(ranks) if e in held[r]) for e in range(experts)]
    if rng.random() < 0.4:
        for row in held:
            row.extend(int(e) for e in rng.integers(experts, size=rng.integers(3)))
    size = max(1, max(len(row) for row in held)) + spare
    slots = np.full((ranks, size), -1, np.int32)
    for r, row in enumerate(held):
        slots[r, : len(row)] = row
    home = np.array([r * size + held[r].index(e) for e, r in enumerate(home_rank)], np.int32)
    total = int(rng.choice([0, 3, 40, 3000, 10**6, 2**31 - 1 - 2**20]))
    case = LevelCase(f"draw {seed}", ranks, spare, slots.ravel(), home, draw_loads(rng, experts, total))
    if rng.random() < 0.3:
        case.alive = np.array([bool(row) or rng.random() < 0.5 for row in held])
    if rng.random() < 0.3:
        case.fixed = rng.integers(0, min(total, 2**20) // ranks + 1, ranks).astype(np.int32)
        case.fixed *= 1 if case.alive is None else case.alive.astype(np.int32)
    case.rules = {
        "capacity_factor": float(rng.choice([1, 1, 1.1, 2])),
        "imbalance_threshold": float(rng.choice([0, 0, 1.3])),
        "per_expert": bool(rng.random() < 0.3),
        "min_chunk": int(rng.choice([1, 1, 7, 500, 10_000])),
        "ranks_per_node": int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])),
        "within": "node" if rng.random() < 0.3 else "all",
    }
    if rng.random() < 0.5:
        for costs in ("import_costs", "export_costs"):
            case.rules[costs] = (int(rng.choice([0, 1, 50, 2000])), int(rng.choice([0, 3, 400])))
    return case.split_exactly() if rng.random() < 0.5 else case


def check_fill(case: LevelCase, fill: ops.SlotFill) -> None:
    """Everything a fill promises, whatever the rules."""
    ranks, size = case.num_ranks, case.size
    filled = fill.slot_to_expert.numpy()
    changed = np.flatnonzero(filled != case.slots)
    borrowed = filled[changed]
    assert (changed % size >= size - case.spare).all(), f"{case.name}: only spare slots are filled"
    for p, e in zip(changed, borrowed, strict=True):
        row = filled[p // size * size : p // size * size + size]
        assert (row == e).sum() == 1, f"{case.name}: no expert twice on a rank"
        assert case.alive is None or case.alive[p // size], f"{case.name}: dead ranks import nothing"
    per_node = case.rules.get("ranks_per_node") or ranks
    to, home = changed // size, case.home[borrowed] // size
    imports, exports = np.bincount(to, minlength=ranks), np.bincount(home, minlength=ranks)
    across = int((to // per_node != home // per_node).sum())
    counted = [len(changed), imports.max(), exports.max(), across]
    assert fill.telemetry[:4].tolist() == counted, f"{case.name}: telemetry"
    assert imports.max() <= case.spare, f"{case.name}: imports"
    assert not across or case.rules.get("within") != "node", f"{case.name}: an expert left its node"
    flags = int(fill.telemetry[4])
    assert not flags & 1 or len(changed) == 0, f"{case.name}: below the threshold nothing moves"
    split, before = case.exact(fill.slot_to_expert), case.peak(torch.from_numpy(case.slots))
    assert int(split.peak) == int(split.bound), f"{case.name}: peak is the bound"
    assert int(split.peak) <= before <= case.plain().max(), f"{case.name}: no load above the start"
    if flags == 0:
        reached = min(case.capacity(case.rules.get("capacity_factor", 1.0)), 2**31 - 1)
        small = case.rules.get("min_chunk", 1)
        assert int(split.peak) - reached < small, f"{case.name}: above the capacity without a flag"
