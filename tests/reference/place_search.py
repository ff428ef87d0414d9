"""The search of the placer ``scenario`` on NumPy arrays: the same slots as csrc/placers/search.h."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.place_layout import Bottleneck, Floats, Ints, Layout, lane_sum

FIRST_SWEEPS, SWEEPS, PASSES = 24, 4, 3
EXCHANGES, REPOINTS = 3, 8  # estimated changes that are tried, at most


@dataclass(frozen=True)
class Limits:
    """How long a search may be; see csrc/placers/search.h."""

    steps: int
    moves: int
    few_slots: bool
    before: Ints | None


@dataclass(frozen=True)
class Change:
    """An exchange of slots p and q, or (q = -1) slot p's expert becomes ``expert``."""

    gain: float
    score: float
    p: int
    q: int
    expert: int


class Search:
    """One layer's search."""

    def __init__(self, layout: Layout, limits: Limits) -> None:
        self.layout, self.problem, self.limits, self.steps = layout, layout.problem, limits, limits.steps
        self.was = np.zeros_like(layout.holds)
        if limits.before is not None:
            for p in np.flatnonzero(limits.before >= 0).tolist():
                self.was[layout.rank_of(p), limits.before[p]] = True
        self.used, self.now = 0, 0.0
        self.open = np.zeros(layout.ranks, bool)

    def run(self) -> float:
        """Changes the layout; returns the objective."""
        self.restore()
        if self.problem.exact:
            self.layout.level(FIRST_SWEEPS)
        self.now = self.layout.objective()
        if self.limits.moves >= 0:
            while self.steps > 0 and self.best_of_all():
                pass
            return self.now
        for _ in range(PASSES):
            if self.steps <= 0:
                break
            self.open[:] = True
            while self.steps > 0 and (self.exchanges() or self.repoints()):
                pass
        return self.now

    def restore(self) -> None:
        """Every expert without a copy, or without one on its home node, gets the slot that costs least."""
        layout, node = self.layout, self.problem.node
        for e, home in enumerate(self.problem.home):
            if layout.copies[e] and (home < 0 or layout.at_home[e]):
                continue
            tries = [
                (self.after_turn(p, e), p)
                for p in range(len(layout.slot))
                if self.usable(p)
                and not layout.holds[layout.rank_of(p), e]
                and layout.may_drop(p)
                and (home < 0 or node[layout.rank_of(p)] == home)
            ]
            if not tries:
                raise ValueError("before must leave a slot for every expert that lost its last copy")
            _, p = min(tries)
            self.used += self.cost_of(Change(0, 0, p, -1, e))
            self.turn_evenly(p, e)
        if 0 <= self.limits.moves < self.used:
            raise ValueError(
                f"moves must be at least {self.used}: so many slots change to give every expert a copy"
            )

    def exchanges(self) -> bool:
        better, neck = False, Bottleneck(self.layout)
        for i in range(self.layout.ranks):
            if self.steps <= 0 or not self.open[i] or not neck.critical[i]:
                continue
            self.open[i] = False
            if self.try_in_turn(self.find_exchanges(neck, i), EXCHANGES if self.problem.exact else 1):
                better, neck = True, Bottleneck(self.layout)
        return better

    def repoints(self) -> bool:
        if not self.problem.exact and not self.limits.few_slots:
            return False
        return self.try_in_turn(
            self.find_repoints(Bottleneck(self.layout)), REPOINTS if self.problem.exact else 1
        )

    def best_of_all(self) -> bool:
        neck = Bottleneck(self.layout)
        found: list[Change] = []
        for i in np.flatnonzero(neck.critical):
            found += self.find_exchanges(neck, int(i))
        return self.try_in_turn(found + self.find_repoints(neck), REPOINTS)

    def try_in_turn(self, found: list[Change], most: int) -> bool:
        for change in sorted(found, key=lambda change: -change.score)[:most]:  # stable: ties as found
            self.steps -= 1
            if self.attempt(change):
                return True
        return False

    def usable(self, p: int) -> bool:
        return bool(p % self.problem.width < self.problem.capacity[self.layout.rank_of(p)])

    def slots_of(self, r: int) -> list[int]:
        start = r * self.problem.width
        return list(range(start, start + self.problem.capacity[r]))

    def find_exchanges(self, neck: Bottleneck, i: int) -> list[Change]:
        """All exchanges with rank i that promise a gain."""
        layout = self.layout
        found: list[Change] = []
        for j in range(layout.ranks):
            own, others = self.slots_of(i), self.slots_of(j)
            if j == i or not own or not others:
                continue
            after = self.after_exchanges(neck, i, j)
            for p, row in zip(own, after, strict=True):
                a = layout.slot[p]
                if not layout.may_move(a, i, j):
                    continue
                for q, then in zip(others, row, strict=True):
                    b = layout.slot[q]
                    if a != b and layout.may_move(b, j, i):
                        self.consider(self.now - then, p, q, -1, found)
        return found

    def after_exchanges(self, neck: Bottleneck, i: int, j: int) -> Floats:
        """[slots of i, slots of j] the objective after each exchange; an estimate with an exact split."""
        layout, problem = self.layout, self.problem
        moved = layout.share[self.slots_of(i)][:, None] - layout.share[self.slots_of(j)]
        here, there = layout.rank_load[i] - moved, layout.rank_load[j] + moved
        ti, tj = problem.tick[i], problem.tick[j]
        if problem.exact:
            mi, mj = neck.member[i], neck.member[j]
            level = neck.peak + (mj - mi) * moved * neck.relief
            outside = np.maximum((1 - mi) * here * ti, (1 - mj) * there * tj)
            cost = np.maximum(level, outside)
        else:
            rest = np.delete(layout.costs(), [i, j], axis=0).max(0, initial=0)
            cost = np.maximum(rest, np.maximum(here * ti, there * tj))
        sums: Floats = lane_sum(problem.weight * cost)
        return sums

    def find_repoints(self, neck: Bottleneck) -> list[Change]:
        """All changes of one slot that promise a gain."""
        layout = self.layout
        found: list[Change] = []
        on_peak = [e for p, e in enumerate(layout.slot) if e >= 0 and neck.critical[layout.rank_of(p)]]
        hot = np.isin(np.arange(len(layout.copies)), on_peak)
        held, outside = self.bottleneck_loads(neck)
        for p in range(len(layout.slot)):
            r = layout.rank_of(p)
            if not self.usable(p) or not layout.may_drop(p):
                continue
            gains = self.relief_gains(neck, p, held, outside) if self.problem.exact else None
            for y in np.flatnonzero(~layout.holds[r]).tolist():
                if gains is not None:
                    self.consider(float(gains[y]), p, -1, y, found)
                elif hot[y] or neck.critical[r]:
                    self.consider(self.now - self.after_turn(p, y), p, -1, y, found)
        return found

    def bottleneck_loads(self, neck: Bottleneck) -> tuple[Floats, Floats]:
        """[E, n] every expert's load inside the bottleneck, and its copies outside."""
        held, outside = np.zeros_like(self.problem.load), np.zeros_like(self.problem.load)
        for p, e in enumerate(self.layout.slot):
            if e >= 0:
                member = neck.member[self.layout.rank_of(p)]
                held[e] += self.layout.share[p] * member
                outside[e] += 1 - member
        return held, outside

    def relief_gains(self, neck: Bottleneck, p: int, held: Floats, outside: Floats) -> Floats:
        """[E] estimated gain of each expert in slot p, with an exact split."""
        layout, r, x = self.layout, self.layout.rank_of(p), self.layout.slot[p]
        own, takes = layout.share[p], neck.member[r] == 0
        room = np.where(takes, neck.peak / self.problem.tick[r] - layout.rank_load[r] + own, 0)
        alone = outside[x] <= 1 if x >= 0 else np.zeros(len(own), bool)
        back = np.where(takes & alone, own, 0)
        gains: Floats = lane_sum(self.problem.weight * ((np.minimum(held, room) - back) * neck.relief))
        return gains

    def after_turn(self, p: int, y: int) -> float:
        """With an even split: the objective after slot p's expert becomes y."""
        tried = self.layout.copy()
        self._turn(tried, p, y)
        return tried.objective()

    def turn_evenly(self, p: int, y: int) -> None:
        self._turn(self.layout, p, y)

    @staticmethod
    def _turn(layout: Layout, p: int, y: int) -> None:
        if (x := layout.slot[p]) >= 0:
            layout.clear(p)
            layout.split_evenly(x)
        layout.note(p, y, 1)
        layout.split_evenly(y)

    def consider(self, gain: float, p: int, q: int, expert: int, found: list[Change]) -> None:
        """Adds a change that promises a gain, if there are moves for it."""
        cost = 1 if self.limits.moves < 0 else self.cost_of(Change(0, 0, p, q, expert))
        if gain <= 0 or 0 <= self.limits.moves < self.used + cost:
            return
        found.append(Change(gain, gain / cost if cost > 0 else 2 * gain, p, q, expert))

    def is_new(self, r: int, e: int) -> int:
        return int(e >= 0 and not self.was[r, e])

    def cost_of(self, change: Change) -> int:
        """How many more slots differ from those before."""
        i, a = self.layout.rank_of(change.p), self.layout.slot[change.p]
        if change.q < 0:
            return self.is_new(i, change.expert) - self.is_new(i, a)
        j, b = self.layout.rank_of(change.q), self.layout.slot[change.q]
        return self.is_new(i, b) - self.is_new(i, a) + self.is_new(j, a) - self.is_new(j, b)

    def attempt(self, change: Change) -> bool:
        """Makes a change if it lowers the objective."""
        cost, saved, layout = self.cost_of(change), self.layout.copy(), self.layout
        if change.q >= 0:
            layout.exchange(change.p, change.q)
        elif not self.problem.exact:
            self.turn_evenly(change.p, change.expert)
        else:
            if layout.slot[change.p] >= 0:
                layout.clear(change.p)
            layout.note(change.p, change.expert, 1)
        if self.problem.exact:
            layout.level(2 * SWEEPS if change.q < 0 else SWEEPS)
        then = layout.objective()
        if then >= self.now:
            layout.__dict__.update(saved.__dict__)
            return False
        self.now, self.used = then, self.used + cost
        self.open[layout.rank_of(change.p)] = True
        if change.q >= 0:
            self.open[layout.rank_of(change.q)] = True
        return True
