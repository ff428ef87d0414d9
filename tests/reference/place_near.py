"""Fewer rows to other nodes, on NumPy arrays: the same slots as csrc/placers/near.h and rows.h."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from reference.place_layout import Floats, Ints, Layout, Problem, lane_sum
from reference.place_scenario import take_over

FIRST_SWEEPS, SWEEPS = 24, 12
MEAN_SLACK, LEVEL_SLACK = 1.02, 1.002


def place_near(
    *,
    slots: Ints,
    loads: Floats,
    stress: Floats,
    weight: Floats,
    tick: Floats,
    node: Ints,
    home: Ints,
    before: Ints | None,
    topk_ids: Ints,
    token_weight: Ints,
    rows_node: Ints,
    steps: int,
    walk: int,
    moves: int,
    starts: int,
    threads: int = 1,
) -> tuple[Ints, Any]:
    """Slots [L, R, width] int32 and rows [L, 2]; placers/compiled.py has the arguments."""
    width, found, rows = slots.shape[2], [], []
    for layer in range(len(loads)):
        problem = Problem(
            loads[layer], weight, tick, node, home[layer], np.full(len(tick), width, np.int32), width, False
        )
        old = None if before is None else before[layer].ravel()
        searches = [
            Near(
                problem,
                replace(problem, load=stress[layer], exact=True),
                Rows(topk_ids[layer], token_weight, rows_node, len(loads[layer])),
                slots[layer].ravel(),
                old,
                moves,
                start,
            )
            for start in range(starts)
        ]
        first = searches[0].rows.total(searches[0].even.slot)
        ends = [(first, slots[layer].ravel())]
        for start, search in enumerate(searches):
            search.run(steps, walk if start else 0)
            if search.over == 0:
                ends.append((search.rows.total(search.even.slot), search.even.slot))
        least, best = min(ends, key=lambda end: end[0])  # the first of equals
        found.append(best.reshape(-1, width))
        rows.append([first, least])
    return np.array(found, dtype=np.int32), np.array(rows)


class Draw:
    """splitmix64."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        word = 2**64 - 1
        self.state = z = (self.state + 0x9E3779B97F4A7C15) & word
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return ((z ^ (z >> 31)) >> 33) % n


class Rows:
    """Rows to other nodes of tokens [T, K], summed over the nodes that a token may come from."""

    def __init__(self, ids: Ints, weight: Ints, node: Ints, experts: int) -> None:
        self.ids, self.weight, self.node, self.experts = ids, weight, node, experts
        self.nodes = int(node.max()) + 1
        self.number = (np.arange(ids.size, dtype=np.uint64) * 2654435769 & 0xFFFFFFFF) >> 16

    def total(self, slot: Any) -> int:
        """The sum for slots [R * width]."""
        width = len(slot) // len(self.node)
        holds = np.zeros((self.experts + 1, self.nodes), bool)  # the last row is that of absent choices
        for p in np.flatnonzero(slot >= 0):
            holds[slot[p], self.node[p // width]] = True
        near = holds[self.ids]  # [T, K, nodes]
        copies = near.sum(-1)
        number = self.number.reshape(self.ids.shape).astype(int) % np.maximum(copies, 1)
        far = near & (near.cumsum(-1) == number[..., None] + 1)
        total = 0
        for own in range(self.nodes):
            sent = (far & ~near[:, :, own, None]).any(1)
            total += int((sent.sum(1) * self.weight).sum())
        return total


class Near:
    """One search."""

    def __init__(
        self,
        problem: Problem,
        stressed: Problem,
        rows: Rows,
        slots: Ints,
        before: Ints | None,
        moves: int,
        seed: int,
    ) -> None:
        self.problem, self.rows, self.moves, self.draw = problem, rows, moves, Draw(seed)
        self.even, self.level = take_over(Layout(problem), slots), take_over(Layout(stressed), slots)
        self.was = np.zeros_like(self.even.holds)
        if before is not None:
            for p in np.flatnonzero(before >= 0).tolist():
                self.was[p // problem.width, before[p]] = True
        self.used = int((self.even.holds & ~self.was).sum())
        self.level.level(FIRST_SWEEPS)
        cost = [self.mean_cost(r) for r in range(self.even.ranks)]
        speed = ideal = 0.0
        for own, tick in zip(cost, problem.tick, strict=True):
            ideal, speed = ideal + own / tick, speed + 1 / tick
        self.mean_cap = max(*cost, ideal / speed * MEAN_SLACK)
        self.level_cap = self.level.objective() * LEVEL_SLACK
        self.over = 0.0

    def mean_cost(self, r: int) -> float:
        return float(self.problem.tick[r] * lane_sum(self.problem.weight * self.even.rank_load[r]))

    def run(self, steps: int, walk: int) -> None:
        slots, experts = len(self.even.slot), len(self.problem.load)
        for step in range(steps):
            p, q = self.draw.below(slots), self.draw.below(slots + slots // 4)
            if self.even.slot[p] < 0:
                continue
            saved, before = (self.even.copy(), self.level.copy(), self.used), self.even.slot.copy()
            walks = step < walk
            if q < slots:
                done = self.exchange(p, q, walks)
            else:
                done = self.turn(p, self.draw.below(experts))
            if not done or not self.accepts(before, walks):
                self.even, self.level, self.used = saved

    def accepts(self, before: Any, walks: bool) -> bool:
        most = max(self.mean_cost(r) for r in range(self.even.ranks))
        over = beyond(most, self.mean_cap) + beyond(self.level.objective(), self.level_cap)
        if not walks and over >= self.over:
            worse = self.rows.total(self.even.slot) > self.rows.total(before)
            if over > self.over or worse:
                return False
        self.over = over
        return True

    def affords(self, cost: int) -> bool:
        self.used += cost
        return self.moves < 0 or cost <= 0 or self.used <= self.moves

    def is_new(self, r: int, e: int) -> int:
        return int(not self.was[r, e])

    def exchange(self, p: int, q: int, walks: bool) -> bool:
        even, i, j = self.even, self.even.rank_of(p), self.even.rank_of(q)
        a, b = even.slot[p], even.slot[q]
        if i == j or b < 0 or a == b or not even.may_move(a, i, j) or not even.may_move(b, j, i):
            return False
        cost = self.is_new(i, b) - self.is_new(i, a) + self.is_new(j, a) - self.is_new(j, b)
        if not self.affords(cost):
            return False
        same = self.rows.node[i] == self.rows.node[j]
        most = max(self.mean_cost(i), self.mean_cost(j)) if same else self.mean_cap
        even.exchange(p, q)
        if self.over == 0 and not walks and max(self.mean_cost(i), self.mean_cost(j)) > most:
            return False
        self.level.exchange(p, q)
        self.level.level(SWEEPS)
        return True

    def turn(self, p: int, y: int) -> bool:
        even, i, a = self.even, self.even.rank_of(p), self.even.slot[p]
        if even.holds[i, y] or not even.may_drop(p):
            return False
        if not self.affords(self.is_new(i, y) - self.is_new(i, a)):
            return False
        for layout in (even, self.level):
            layout.clear(p)
            layout.note(p, y, 1)
        even.split_evenly(a)
        even.split_evenly(y)
        self.level.level(2 * SWEEPS)
        return True


def beyond(cost: float, cap: float) -> float:
    """By how much a cost exceeds its cap, as a part of it."""
    return cost / cap - 1 if cost > cap else 0.0
