"""plan_lp: the real-valued split with the least largest rank load, by a primal-dual interior point method.

    minimise M   subject to   sum of an expert's parts x = its load               (price w)
                              rank's burden + its parts + slack s = M             (price y)
                              x >= 0, s >= 0

A part is what one rank takes of one replicated expert; all that cannot move is its rank's burden. The optimum has
1'y = 1, y >= 0, z = y - w >= 0 and x z = s y = 0. Each iteration takes Newton's step to x z = s y = target:

1. residuals: what the equations lack; the largest load of the split; the bound that the prices prove.
2. factor: Newton's equations reduce to the normal equations, with weights x / z.
3. predictor: the step to target 0, to see how far mu can fall.
4. corrector: the step to a target between, with the products that the predictor left out.
5. step: almost up to the first zero.

All numbers have the requested dtype, and every sum has a fixed order: the op gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.ops.results import LpSplit
from isoload.ops.tables import ReplicaTables
from reference.cholesky import Cholesky, Indices, Reals, add_by, ordered_sum
from reference.replica_tables import replicas

CONVERGED, OPEN, BROKE_DOWN = range(3)
LIMITS = {torch.float32: (1e-4, 12), torch.float64: (1e-8, 20)}  # default tolerance, most iterations


def plan_lp(
    loads: Tensor,
    tables: ReplicaTables,
    *,
    base: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> LpSplit:
    """The split of isoload.ops.plan_lp, which documents the arguments, operation by operation the same."""
    if tables.data.dim() == 2:
        layers = []
        for i in range(len(tables.data)):
            carried = None if base is None else base[i]
            layers.append(
                plan_lp(
                    loads[i],
                    tables[i],
                    base=carried,
                    dtype=dtype,
                    tolerance=tolerance,
                    iterations=iterations,
                )
            )
        return LpSplit(*map(torch.stack, zip(*layers, strict=True)))
    usual_tolerance, usual_iterations = LIMITS[dtype]
    totals = loads.reshape(-1, tables.num_experts).sum(0, dtype=torch.int64)
    carried = torch.zeros(tables.num_ranks, dtype=dtype) if base is None else base
    with np.errstate(all="ignore"):  # a breakdown ends in status 2
        solver = Solver(totals.numpy(), tables, carried.numpy())
        status, taken = solver.solve(
            usual_tolerance if tolerance is None else tolerance,
            usual_iterations if iterations is None else iterations,
        )
    return LpSplit(
        torch.from_numpy(solver.split()),
        torch.tensor(float(solver.primal), dtype=dtype),
        torch.tensor(float(solver.dual), dtype=dtype),
        torch.tensor(taken, dtype=torch.int32),
        torch.tensor(status, dtype=torch.int32),
    )


class Solver:
    """One layer. Arrays over parts, by slot, over ranks (``rank`` of a part) or over replicated experts with load
    (``expert`` of a part)."""

    def __init__(self, totals: Indices, tables: ReplicaTables, base: Reals) -> None:
        self.real = base.dtype.type
        size = tables.num_slots // tables.num_ranks
        solo = tables.field("solo").numpy()
        self.fixed = np.where(solo >= 0, totals[solo], 0).astype(self.real)  # [P] copies of solo slots
        self.burden = add_by(np.arange(tables.num_slots) // size, self.fixed, base)
        slots_of = replicas(tables)
        order = tables.field("order").tolist()
        split = [e for e in order if e >= 0 and totals[e] > 0]
        self.load = totals[split].astype(self.real)
        parts = sorted((p, i) for i, e in enumerate(split) for p in slots_of[e])
        self.slot = np.array([p for p, _ in parts], dtype=np.int64)
        self.expert = np.array([i for _, i in parts], dtype=np.int64)
        self.rank = self.slot // size
        self.num_edges = self.real(len(parts) + len(base))
        self.equations = Cholesky(self.rank, self.expert, len(base), len(split))
        self.none = np.zeros(len(split), self.real)

    def solve(self, tolerance: float, most: int) -> tuple[int, int]:
        """(status, iterations)"""
        self.tolerance = self.real(tolerance)
        self.spread()
        self.dual = self.burden.max()
        status, taken = self.judge(), 0
        if status == OPEN:
            status = self.centre()
        while status == OPEN and taken < most:
            self.factor()
            self.predict()
            self.correct()
            self.step()
            status = self.residuals()
            taken += 1
        if status == BROKE_DOWN:
            self.spread()
        return status, taken

    def split(self) -> Reals:
        """[P] copies per slot."""
        split: Reals = self.fixed.copy()
        split[self.slot] = self.copies()
        return split

    def by_rank(self, parts: Reals, start: Reals) -> Reals:
        return add_by(self.rank, parts, start)

    def by_expert(self, parts: Reals) -> Reals:
        return add_by(self.expert, parts, self.none)

    def least(self, parts: Reals) -> Reals:
        least = np.full(len(self.load), np.inf, self.real)
        np.minimum.at(least, self.expert, parts)
        return least

    def mean(self, x: Reals, z: Reals, s: Reals, y: Reals) -> Any:
        """The mean product, added up rank by rank."""
        return ordered_sum(self.by_rank(x * z, s * y)) / self.num_edges

    # start

    def spread(self) -> None:
        """Every expert evenly over its replicas."""
        self.x = (self.load / np.bincount(self.expert, minlength=len(self.load)).astype(self.real))[
            self.expert
        ]
        self.find_primal()

    def centre(self) -> int:
        self.M = self.real(1.1) * self.primal
        self.s = self.M - self.cost
        mu = 1 / ordered_sum(1 / self.s)
        self.y = mu / self.s
        prices = self.y[self.rank]
        self.z = prices - self.least(prices - mu / self.x)[self.expert]
        return self.residuals()

    # 1. residuals

    def residuals(self) -> int:
        self.find_primal()
        self.expert_excess = self.load - self.by_expert(self.x)
        self.rank_excess = self.M - self.by_rank(self.x, self.burden) - self.s
        self.mu = self.mean(self.x, self.z, self.s, self.y)
        prices = ordered_sum(self.y)
        self.price_excess = 1 - prices
        value = ordered_sum(self.burden * self.y) + ordered_sum(self.load * self.least(self.y[self.rank]))
        bound = value / prices
        if not (np.isfinite(bound) and np.isfinite(self.mu)):
            return BROKE_DOWN
        self.dual = max(self.dual, bound)
        return self.judge()

    def judge(self) -> int:
        if not np.isfinite(self.primal):
            return BROKE_DOWN
        return CONVERGED if self.primal - self.dual <= self.tolerance * self.primal else OPEN

    def copies(self) -> Reals:
        """The parts, every expert's scaled to its load."""
        scale: Reals = self.load / self.by_expert(self.x)
        copies: Reals = self.x * scale[self.expert]
        return copies

    def find_primal(self) -> None:
        self.cost = self.by_rank(self.copies(), self.burden)
        self.primal = self.cost.max(initial=self.real(0))

    # 2. factor

    def factor(self) -> None:
        self.weight, self.slack_weight = self.x / self.z, self.s / self.y
        self.equations.factor(self.weight, self.slack_weight)
        self.rank_g, self.expert_g = self.equations.solve(np.ones_like(self.y), self.none)
        self.pull = ordered_sum(self.rank_g)

    # 3. predictor

    def predict(self) -> None:
        nothing = self.real(0)
        self.aim(nothing, nothing, nothing)
        self.restore()
        a, b = self.reach(1)
        left = self.mean(
            self.x + a * self.dx, self.z + b * self.dz, self.s + a * self.ds, self.y + b * self.dy
        )
        ratio = left / self.mu
        last = self.real(0.2) * self.tolerance * self.primal / self.num_edges
        self.target = max(ratio * ratio * ratio * self.mu, last)

    # 4. corrector

    def correct(self) -> None:
        self.aim(self.target, self.dx * self.dz, self.ds * self.dy)
        self.restore()
        self.restore()  # against rounding

    # 5. step

    def step(self) -> None:
        a, b = self.reach(0.999)
        self.x, self.s, self.M = self.x + a * self.dx, self.s + a * self.ds, self.M + a * self.dM
        self.z, self.y = self.z + b * self.dz, self.y + b * self.dy

    def reach(self, share: float) -> tuple[Any, Any]:
        """Primal and dual step length, at most 1, that go so far towards a first zero."""

        def length(pairs: Iterable[tuple[Reals, Reals]]) -> Any:
            slopes = np.concatenate([-change / value for value, change in pairs])
            steepest = max(slopes[slopes > 0], default=self.real(0))
            return min(self.real(1), self.real(share) / steepest)

        return (
            length([(self.x, self.dx), (self.s, self.ds)]),
            length([(self.z, self.dz), (self.y, self.dy)]),
        )

    def aim(self, target: Any, part_product: Any, rank_product: Any) -> None:
        """The step to x z = s y = target with prices held."""
        self.dx, self.dz = (target - part_product) / self.z - self.x, np.zeros_like(self.z)
        self.ds, self.dy = (target - rank_product) / self.y - self.s, np.zeros_like(self.y)
        self.dM = self.real(0)

    def restore(self) -> None:
        """Changes prices and M by what ranks, experts and 1'y = 1 still lack."""
        rank_u, expert_u = self.equations.solve(
            self.by_rank(self.dx, self.ds) - self.rank_excess - self.dM,
            self.expert_excess - self.by_expert(self.dx),
        )
        rise = (ordered_sum(rank_u + self.dy) - self.price_excess) / self.pull
        price = rank_u[self.rank] - expert_u[self.expert]
        dz = price - rise * (self.rank_g[self.rank] - self.expert_g[self.expert])
        dy = rank_u - rise * self.rank_g
        self.dz, self.dx = self.dz + dz, self.dx - self.weight * dz
        self.dy, self.ds = self.dy + dy, self.ds - self.slack_weight * dy
        self.dM = self.dM + rise
