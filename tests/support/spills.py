"""Random and named spilling problems, and what every spill promises, checked from the placement alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isoload import ops

Rng = np.random.Generator


@dataclass
class SpillCase:
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

    def spill(self, planner: Any = ops.plan_spill, **rules: Any) -> ops.Spill:
        return planner(*self.arguments(), **{**self.options(), **rules})

    def plain(self) -> np.ndarray:
        """[R] int64 loads before anything is lent: as `start` has it, else of plain EP."""
        load = np.zeros(self.num_ranks, np.int64) if self.fixed is None else self.fixed.astype(np.int64)
        if self.start is not None:
            return load + self.start.reshape(self.num_ranks, -1).sum(1)
        np.add.at(load, self.home // self.size, self.loads)
        return load

    def live(self) -> int:
        return self.num_ranks if self.alive is None else int(self.alive.sum())

    def split_exactly(self) -> SpillCase:
        """Starts from the exact split over the resident replicas."""
        loads, slots, _, ranks, _, fixed = self.arguments()
        self.start = ops.plan_exact(loads, ops.replica_tables(slots, ranks, len(loads)), fixed).quota.numpy()
        return self

    def capacity(self, factor: float) -> int:
        """Of a rank: from the mean of the live ranks, or of the most loaded node's if experts stay there."""
        size = (self.rules.get("ranks_per_node") or self.num_ranks) if self.within_node() else self.num_ranks
        alive = np.ones(self.num_ranks, bool) if self.alive is None else self.alive
        groups = zip(self.plain().reshape(-1, size).sum(1), alive.reshape(-1, size).sum(1), strict=True)
        return max(-(-int(n) * round(factor * 1e6) // (10**6 * int(live))) for n, live in groups if live)

    def within_node(self) -> bool:
        return self.rules.get("within") == "node"


def in_order(loads: Any, ranks: int, spare: int = 4, name: str = "in order", **rules: Any) -> SpillCase:
    """E / R experts per rank, one replica each, spare slots after them."""
    loads = np.asarray(loads, np.int32)
    per_rank = len(loads) // ranks
    slots = np.full((ranks, per_rank + spare), -1, np.int32)
    slots[:, :per_rank] = np.arange(len(loads)).reshape(ranks, per_rank)
    home = np.flatnonzero(slots.ravel() >= 0).astype(np.int32)
    return SpillCase(name, ranks, spare, slots.ravel(), home, loads, rules=rules)


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


def draw(seed: int) -> SpillCase:
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
    case = SpillCase(f"draw {seed}", ranks, spare, slots.ravel(), home, draw_loads(rng, experts, total))
    if rng.random() < 0.3:
        case.alive = np.array([bool(row) or rng.random() < 0.5 for row in held])
    if rng.random() < 0.3:
        case.fixed = rng.integers(0, min(total, 2**20) // ranks + 1, ranks).astype(np.int32)
        case.fixed *= 1 if case.alive is None else case.alive.astype(np.int32)
    case.rules = {
        "capacity_factor": float(rng.choice([1, 1.1, 2])) if rng.random() < 0.6 else None,
        "imbalance_threshold": float(rng.choice([0, 0, 1.3])),
        "per_expert": bool(rng.random() < 0.3),
        "tolerance": float(rng.choice([0, 0.02, 0.3])),
        "min_chunk": int(rng.choice([1, 1, 7, 500, 10_000])),
        "import_costs": (int(rng.choice([0, 1, 50, 2000])), int(rng.choice([0, 3, 400]))),
        "egress": None if rng.random() < 0.6 else int(rng.integers(0, 4)),
        "ranks_per_node": int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0])),
        "within": "node" if rng.random() < 0.3 else "all",
    }
    return case.split_exactly() if rng.random() < 0.5 else case


def check_spill(case: SpillCase, spill: ops.Spill) -> None:
    """Everything a spill promises, whatever the rules."""
    ranks, size, experts = case.num_ranks, case.size, len(case.loads)
    filled, quota = spill.slot_to_expert.numpy(), spill.quota.numpy().astype(np.int64)
    changed = np.flatnonzero(filled != case.slots)
    borrowed = filled[changed]
    assert (changed % size >= size - case.spare).all(), f"{case.name}: only spare slots are filled"
    assert (quota >= 0).all() and not quota[filled < 0].any(), (
        f"{case.name}: quotas >= 0, none in empty slots"
    )
    taken = np.bincount(np.maximum(filled, 0), quota, minlength=experts)
    assert np.array_equal(taken, case.loads), f"{case.name}: conservation"
    assert (quota[changed] > 0).all(), f"{case.name}: an import takes copies"
    for p, e in zip(changed, borrowed, strict=True):
        row = filled[p // size * size : p // size * size + size]
        assert (row == e).sum() == 1, f"{case.name}: no expert twice on a rank"
        assert case.alive is None or case.alive[p // size], f"{case.name}: dead ranks import nothing"
    load = quota.reshape(ranks, size).sum(1) + (0 if case.fixed is None else case.fixed)
    assert load.max() <= case.plain().max(), f"{case.name}: no load above the start"
    check_telemetry(case, spill, changed, borrowed)
    check_level(case, spill, load, changed)


def check_telemetry(case: SpillCase, spill: ops.Spill, changed: np.ndarray, borrowed: np.ndarray) -> None:
    ranks, per_node = case.num_ranks, case.rules.get("ranks_per_node") or case.num_ranks
    to, home = changed // case.size, case.home[borrowed] // case.size
    imports, exports = np.bincount(to, minlength=ranks), np.bincount(home, minlength=ranks)
    across = int((to // per_node != home // per_node).sum())
    counted = [len(changed), imports.max(), exports.max(), across]
    assert spill.telemetry[:4].tolist() == counted, f"{case.name}: telemetry"
    assert not across or not case.within_node(), f"{case.name}: an expert left its node"
    egress = case.rules.get("egress")
    assert egress is None or exports.max() <= egress, f"{case.name}: egress limit"


def check_level(case: SpillCase, spill: ops.Spill, load: np.ndarray, changed: np.ndarray) -> None:
    """The capacity is kept unless a flag says why not; a sought level is the largest cost."""
    factor, level, flags = case.rules.get("capacity_factor", 1.0), int(spill.level), int(spill.telemetry[4])
    if flags & 1:
        assert len(changed) == 0 and level == load.max(), f"{case.name}: below the threshold nothing moves"
        return
    near, far = case.rules.get("import_costs", (0, 0))
    per_node = case.rules.get("ranks_per_node") or case.num_ranks
    cost = load.copy()
    for p in changed:
        rank, home = p // case.size, case.home[spill.slot_to_expert[p]] // case.size
        cost[rank] += near if rank // per_node == home // per_node else far
    if factor is None:
        assert level == cost.max() <= case.plain().max(), f"{case.name}: the level is the largest cost"
        return
    assert level == min(case.capacity(factor), 2**31 - 1), case.name
    slack = level * round(case.rules.get("tolerance", 0.0) * 1e6) // 10**6
    assert flags or cost.max() <= level + slack, f"{case.name}: above the capacity without a flag"
    assert not flags or cost.max() > level, f"{case.name}: a flag without a reason"
    little = case.plain() < level + case.rules.get("min_chunk", 1)
    assert (load >= case.plain())[little].all() or case.start is not None, (
        f"{case.name}: an excess below min_chunk moved"
    )
