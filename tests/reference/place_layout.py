"""One layer while the placer ``scenario`` searches it, on NumPy arrays: csrc/placers/layout.h, exchanges.h, level.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
LANES = 4


def lane_sum(terms: Floats) -> Any:
    """Sums of terms [..., n] in four lanes, in the order of csrc/placers."""
    lanes = np.zeros((*terms.shape[:-1], LANES))
    for start in range(0, terms.shape[-1], LANES):
        lanes = lanes + terms[..., start : start + LANES]
    return (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])


@dataclass(frozen=True, eq=False)
class Problem:
    """What a layer's search reads; see csrc/placers/layout.h."""

    load: Floats  # [E, n]
    weight: Floats  # [n]
    tick: Floats  # [R]
    node: Ints  # [R]
    home: Ints  # [E]
    capacity: Ints  # [R]
    width: int
    exact: bool


class Layout:
    """Slots [R * width], what each carries [R * width, n], and the ranks' loads [R, n]."""

    def __init__(self, problem: Problem) -> None:
        (experts, n), ranks = problem.load.shape, len(problem.tick)
        self.problem, self.ranks = problem, ranks
        self.slot = np.full(ranks * problem.width, -1)
        self.copies, self.at_home = np.zeros(experts, int), np.zeros(experts, int)
        self.holds = np.zeros((ranks, experts), bool)
        self.share, self.rank_load = np.zeros((len(self.slot), n)), np.zeros((ranks, n))

    def copy(self) -> Layout:
        other = Layout(self.problem)
        for name in ("slot", "copies", "at_home", "holds", "share", "rank_load"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def rank_of(self, p: int) -> int:
        return p // self.problem.width

    def note(self, p: int, e: int, sign: int) -> None:
        """Slot p holds expert e, or (sign = -1) no longer does."""
        r = self.rank_of(p)
        self.slot[p] = e if sign > 0 else -1
        self.copies[e] += sign
        self.at_home[e] += sign * int(self.problem.node[r] == self.problem.home[e])
        self.holds[r, e] = sign > 0

    def carry(self, p: int, row: Floats) -> None:
        """The load of slot p changes to row [n]."""
        self.rank_load[self.rank_of(p)] += row - self.share[p]
        self.share[p] = row

    def split_evenly(self, e: int) -> None:
        for p in np.flatnonzero(self.slot == e).tolist():
            self.carry(p, np.trunc(self.problem.load[e] / self.copies[e]))

    def clear(self, p: int) -> None:
        """Slot p holds nothing any more; the lowest copy that is left takes over what it carried."""
        e, own = self.slot[p], self.share[p].copy()
        self.note(p, e, -1)
        self.carry(p, np.zeros_like(own))
        if (left := np.flatnonzero(self.slot == e)).size:
            self.carry(left[0], self.share[left[0]] + own)

    def costs(self) -> Floats:
        """[R, n] cost of every rank."""
        cost: Floats = self.rank_load * self.problem.tick[:, None]
        return cost

    def objective(self) -> float:
        return float(lane_sum(self.problem.weight * self.costs().max(0, initial=0)))

    def may_move(self, a: int, i: int, j: int) -> bool:
        """Whether expert a (-1: none) may move from rank i to rank j."""
        if a < 0:
            return True
        if self.holds[j, a]:
            return False
        home, node = self.problem.home[a], self.problem.node
        return bool(home < 0 or node[i] != home or node[j] == home or self.at_home[a] > 1)

    def may_drop(self, p: int) -> bool:
        """Whether slot p may lose its expert."""
        x = self.slot[p]
        if x < 0:
            return True
        home = self.problem.home[x]
        away = home < 0 or self.problem.node[self.rank_of(p)] != home or self.at_home[x] > 1
        return bool(self.copies[x] >= 2 and away)

    def exchange(self, p: int, q: int) -> None:
        """Slots p and q change places, with what they carry."""
        a, b = self.slot[p], self.slot[q]
        for slot, expert, sign in ((p, a, -1), (q, b, -1), (p, b, 1), (q, a, 1)):
            if expert >= 0:
                self.note(slot, expert, sign)
        own, other = self.share[p].copy(), self.share[q].copy()
        self.carry(p, other)
        self.carry(q, own)

    def find_pairs(self) -> list[tuple[int, int]]:
        """Slots whose loads may be levelled against each other."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        pairs = []
        for p, e in enumerate(self.slot.tolist()):
            if e < 0:
                continue
            if e in last:
                pairs.append((last[e], p))
            else:
                first[e] = p
            last[e] = p
        return pairs + [(last[e], first[e]) for e in range(len(self.copies)) if self.copies[e] > 2]

    def level(self, sweeps: int) -> None:
        """Replicated experts' loads moved between their copies, pair by pair, until ranks are nearly level."""
        tick, pairs = self.problem.tick, self.find_pairs()
        for p, q in pairs * sweeps:
            i, j = self.rank_of(p), self.rank_of(q)
            own, other = self.share[p].copy(), self.share[q].copy()
            here, there = self.rank_load[i] - own, self.rank_load[j] + own
            wish = (there * tick[j] - here * tick[i]) / (tick[i] + tick[j])
            part = np.trunc(np.minimum(np.maximum(wish, 0), own + other))
            self.carry(p, part)
            self.carry(q, other - (part - own))


class Bottleneck:
    """The ranks at the peak, per scenario: peak [n], members [R, n], relief [n]."""

    def __init__(self, layout: Layout) -> None:
        problem, cost = layout.problem, layout.costs()
        self.peak = cost.max(0, initial=0)
        near = 1 - 1 / 256 if problem.exact else 1.0
        self.member = (cost >= self.peak * near).astype(float)
        speed = np.zeros_like(self.peak)
        for member, tick in zip(self.member, problem.tick, strict=True):
            speed = speed + member * (1 / tick)
        self.relief = 1 / speed
        self.critical = ((self.member > 0) & (self.peak > 0) & (problem.weight > 0)).any(1)
