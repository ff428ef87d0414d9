"""plan_exact: split every replicated expert's copies so that the busiest rank carries as little as possible.

Copies are a flow from experts to the ranks that hold them. What can be computed only inside a set of ranks
must fit there, so the mean load of any such set is a lower bound of the peak, and the best of these bounds is
the optimum (max-flow = min-cut). The solver works on both sides: it moves copies to lower the peak, and it
proves a bound.

1. start: every replicated expert evenly over its replicas, or as another objective requires (start.py).
2. sweeps: each replicated expert in turn is rebalanced over its own ranks; removes most of the imbalance.
3. paths: while a rank carries more than the target allows, it hands copies along a shortest path of ranks
   to one with room (augmentation).
4. bound: if there is no such path, the ranks that the overloaded ones can reach are such a set. Its bound
   is the next target.

Copies that are poured over the ranks afterwards, each on any rank, only add to what all ranks together must
carry. So no split need be better than the level at which all ranks have room for everything.

Everything is integral, and ties go to the lowest rank, then to the first expert in the tables' order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from isoload.ops.results import ExactSplit
from isoload.ops.tables import ReplicaTables
from reference.replica_tables import replicas
from reference.share import share
from reference.start import ReplicatedExpert, local, spread

MAX_COPIES = 2**31 - 1
Objective = Literal["spread", "local"]


def plan_exact(
    loads: Tensor,
    tables: ReplicaTables,
    fixed: Tensor | None = None,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    pour: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
    rank: int | None = None,
) -> ExactSplit:
    """The split of isoload.ops.plan_exact, which documents the arguments, move by move the same."""
    if tables.data.dim() == 2:
        layers = [
            plan_exact(
                loads[i],
                tables[i],
                None if fixed is None else fixed[i],
                tolerance,
                budget,
                ticks=ticks,
                pour=None if pour is None else pour[i],
                objective=objective,
                ranks_per_node=ranks_per_node,
                sweeps=sweeps,
                rank=rank,
            )
            for i in range(len(tables.data))
        ]
        return ExactSplit(*(torch.stack(field) for field in zip(*layers, strict=True)))

    totals = loads.reshape(-1, tables.num_experts).sum(0).tolist()
    carried = [0] * tables.num_ranks if fixed is None else fixed.tolist()
    solver = Solver(
        totals,
        tables,
        carried,
        None if ticks is None else ticks.tolist(),
        0 if pour is None else int(pour),
        tolerance,
    )
    if objective == "spread":
        spread(solver.experts, solver.load)
    else:
        local(solver.experts, solver.load, loads.tolist(), ranks_per_node or tables.num_ranks)
    if sweeps is None:
        sweeps = 4 if objective == "spread" else 0
    telemetry = solver.solve(sweeps, budget)
    quota = solver.quota()

    assert [sum(quota[p] for p in slots) for slots in replicas(tables)] == totals, "quotas sum to their loads"
    assert sum(quota) == sum(totals) and min(quota) >= 0, "nothing goes to other slots, nothing is negative"
    for p, copies in enumerate(quota):
        carried[solver.rank_of(p)] += copies
    assert carried == solver.load, "loads follow from the quota"
    peak = max(solver.peak(), solver.level)
    assert solver.bound <= peak, "a bound is below every peak"
    assert telemetry[-1] or peak <= solver.target(), "only the budget stops short of the target"
    of_slots, per_node = torch.tensor(quota, dtype=torch.int32), ranks_per_node or tables.num_ranks
    return ExactSplit(
        of_slots,
        torch.tensor(peak),
        torch.tensor(solver.bound),
        torch.tensor(telemetry, dtype=torch.int32),
        of_slots[:0] if rank is None else share(loads, of_slots, tables, per_node, rank),
    )


class Solver:
    """One layer, without the replicated experts' copies: a start (start.py) gives them to replicas.

    Per rank: ``load`` in copies, ``ticks`` a copy costs, ``cap`` copies the target allows.
    """

    def __init__(
        self,
        totals: list[int],
        tables: ReplicaTables,
        fixed: list[int],
        ticks: list[int] | None,
        pour: int,
        tolerance: float,
    ) -> None:
        self.ranks = range(tables.num_ranks)
        self.num_slots = tables.num_slots
        self.equal_ranks = ticks is None
        self.ticks = [1] * len(self.ranks) if ticks is None else ticks
        self.tolerance_ppm = round(tolerance * 1_000_000)
        self.load = list(fixed)
        self.solo = {p: totals[e] for p, e in enumerate(tables.field("solo").tolist()) if e >= 0}
        for p, copies in self.solo.items():
            self.load[self.rank_of(p)] += copies
        self.level = self.least_peak(self.ranks, sum(totals) + sum(fixed) + pour)
        self.bound = max(self.peak(), self.level)
        held = replicas(tables)
        self.experts = []
        for e in tables.field("order").tolist()[: tables.field("header").tolist()[0]]:
            slots = {self.rank_of(p): p for p in held[e]}
            self.experts.append(ReplicatedExpert(e, totals[e], slots, dict.fromkeys(slots, 0)))

    def solve(self, sweeps: int, budget: int | None) -> list[int]:
        """Lowers the peak to the target; returns sweeps, augmentations, Newton steps, 1 if the
        budget ended it."""
        swept = paths = steps = 0
        while swept < sweeps and self.peak() > self.target():
            for x in self.experts:
                self.balance(x)
            swept += 1
        self.aim()
        while self.overloaded():
            levels = self.levels()
            if levels is None:
                self.raise_bound()
                self.aim()
                steps += 1
            elif budget is not None and paths >= budget:
                return [swept, paths, steps, 1]
            else:
                self.augment(levels)
                paths += 1
        return [swept, paths, steps, 0]

    def quota(self) -> list[int]:
        """[P] copies per slot."""
        quota = dict(self.solo)
        for x in self.experts:
            quota |= {x.slots[r]: copies for r, copies in x.quota.items()}
        return [quota.get(p, 0) for p in range(self.num_slots)]

    def rank_of(self, slot: int) -> int:
        return slot // (self.num_slots // len(self.ranks))

    def cost(self, rank: int) -> int:
        return self.load[rank] * self.ticks[rank]

    def peak(self) -> int:
        return max(map(self.cost, self.ranks))

    def target(self) -> int:
        return self.bound + self.bound * self.tolerance_ppm // 1_000_000

    def least_peak(self, ranks: Iterable[int], copies: int) -> int:
        """The least peak at which these ranks together can carry so many copies."""
        ticks = [self.ticks[r] for r in ranks]
        enough = range(copies * max(ticks) + 1)
        return bisect_left(enough, copies, key=lambda peak: sum(peak // t for t in ticks))

    def move(self, x: ReplicatedExpert, giver: int, taker: int, copies: int) -> None:
        x.quota[giver] -= copies
        x.quota[taker] += copies
        self.load[giver] -= copies
        self.load[taker] += copies

    # 2. sweeps. Neither move raises the largest cost among the expert's ranks.

    def balance(self, x: ReplicatedExpert) -> None:
        if len(x.slots) > 2 and self.equal_ranks:
            self.balance_level(x)
        elif x.givers():
            self.balance_pair(x)

    def balance_pair(self, x: ReplicatedExpert) -> None:
        """From the costliest replica to the cheapest. Between equal ranks 7/10 of the gap, not 1/2: the
        overshoot leaves less for the next sweep."""
        high, low = max(x.givers(), key=self.cost), min(x.slots, key=self.cost)
        gap = max(0, self.cost(high) - self.cost(low))
        copies = 7 * gap // 10 if self.equal_ranks else gap // (self.ticks[high] + self.ticks[low])
        self.move(x, high, low, min(copies, x.quota[high]))

    def balance_level(self, x: ReplicatedExpert) -> None:
        """Pours the expert's copies anew onto what its ranks carry besides, up to one common water level."""
        base = {r: self.load[r] - x.quota[r] for r in x.slots}
        rising = sorted(base.values())
        wet = max(n for n in range(1, len(rising) + 1) if x.total >= n * rising[n - 1] - sum(rising[:n]))
        water, rest = divmod(x.total + sum(rising[:wet]), wet)
        for r in x.slots:
            x.quota[r] = 0
            if base[r] <= water:
                x.quota[r] = water - base[r] + (rest > 0)
                rest = max(0, rest - 1)
            self.load[r] = base[r] + x.quota[r]

    # 3. paths

    def aim(self) -> None:
        """The target in copies per rank. Caps end at MAX_COPIES, which no load exceeds: the op's are int32."""
        self.cap = [min(self.target() // t, MAX_COPIES) for t in self.ticks]

    def room(self, rank: int) -> int:
        return self.cap[rank] - self.load[rank]

    def overloaded(self) -> set[int]:
        return {r for r in self.ranks if self.room(r) < 0}

    def levels(self) -> list[set[int]] | None:
        """Ranks by the length of their path: level 0 has room, level k can hand copies to level k - 1. The
        last level is the first with an overloaded rank; None if no path starts at one."""
        levels = [{r for r in self.ranks if self.room(r) > 0}]
        while levels[-1].isdisjoint(self.overloaded()):
            handing = {r for x in self.experts if not levels[-1].isdisjoint(x.slots) for r in x.givers()}
            levels.append(handing.difference(*levels))
            if not levels[-1]:
                return None
        return levels

    def augment(self, levels: list[set[int]]) -> None:
        """One path from the lowest overloaded rank down the levels: as many copies as the excess at its
        start, the quota at every hop and the room at its end permit."""
        giver = min(levels.pop() & self.overloaded())
        width, hops = -self.room(giver), []
        while levels:
            level = levels.pop()
            x = self.widest(giver, level)
            takers = [r for r in x.slots if r in level]
            taker = takers[0] if levels else max(takers, key=self.room)
            hops.append((x, giver, taker))
            width = min(width, x.quota[giver])
            giver = taker
        width = min(width, self.room(giver))
        for hop in hops:
            self.move(*hop, width)

    def widest(self, giver: int, level: set[int]) -> ReplicatedExpert:
        """The expert of which a rank can hand most copies to a level, the first of equal ones."""
        able = [x for x in self.experts if x.quota.get(giver, 0) > 0 and not level.isdisjoint(x.slots)]
        return max(able, key=lambda x: x.quota[giver])

    # 4. bound

    def raise_bound(self) -> None:
        """All copies on the ranks that overloaded ones can reach must be computed there."""
        closed: set[int] = set()
        reached = self.overloaded()
        while reached != closed:
            closed = reached
            reached = closed.union(*(x.slots for x in self.experts if not closed.isdisjoint(x.givers())))
        assert len(closed) < len(self.ranks), "all ranks together have room at the target, pour included"
        bound = self.least_peak(closed, sum(self.load[r] for r in closed))
        assert bound > self.target(), "ranks that carry more than the target allows prove a higher bound"
        self.bound = bound
