"""Other ways to solve the split, for bench_plan: HiGHS, and five steps of primal affine scaling.

The affine scaling is our re-implementation on CPU (NumPy, float32, BLAS and LAPACK) of the method that SGLang's
`lp` dispatch runs in a CUDA kernel. It says how much arithmetic the method needs and how near it comes; it says
nothing about the speed of SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

import isoload
from lib.harness import measure

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True)
class SplitProblem:
    """min M over x >= 0: each replicated expert's parts sum to its load, solo + parts of a rank <= M."""

    solo: np.ndarray[tuple[int], np.dtype[np.float64]]  # [R] load that cannot move
    load: np.ndarray[tuple[int], np.dtype[np.float64]]  # [n] of each replicated expert
    expert: np.ndarray[tuple[int], np.dtype[np.int64]]  # [parts] replicated expert of a part
    rank: np.ndarray[tuple[int], np.dtype[np.int64]]  # [parts] its rank

    def peak(self, parts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return float((self.solo + np.bincount(self.rank, parts, len(self.solo))).max())


def split_problem(slot_to_expert: np.ndarray, loads: np.ndarray, num_ranks: int) -> SplitProblem:
    """From slot_to_expert [P] and loads [E]."""
    size = len(slot_to_expert) // num_ranks
    pairs = sorted({(int(e), p // size) for p, e in enumerate(slot_to_expert) if e >= 0})
    copies = np.bincount([e for e, _ in pairs], minlength=len(loads))
    split = np.flatnonzero(copies > 1)
    index = {int(e): i for i, e in enumerate(split)}
    solo = np.zeros(num_ranks)
    for e, r in pairs:
        if e not in index:
            solo[r] += loads[e]
    parts = [(index[e], r) for e, r in pairs if e in index]
    expert, rank = (np.array(column, dtype=np.int64) for column in zip(*parts, strict=True))
    return SplitProblem(solo, loads[split].astype(np.float64), expert, rank)


def highs_model(problem: SplitProblem) -> highspy.Highs:
    """The linear program, built and ready to run; building is not timed."""
    ranks, experts, parts = len(problem.solo), len(problem.load), len(problem.expert)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = parts + 1, experts + ranks
    lp.col_cost_ = np.append(np.zeros(parts), 1.0)
    lp.col_lower_, lp.col_upper_ = np.zeros(parts + 1), np.full(parts + 1, highspy.kHighsInf)
    lp.row_lower_ = np.concatenate([problem.load, np.full(ranks, -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([problem.load, -problem.solo])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.append(np.arange(0, 2 * parts + 1, 2), 2 * parts + ranks)
    rows = np.stack([problem.expert, experts + problem.rank], axis=1).ravel()
    lp.a_matrix_.index_ = np.concatenate([rows, experts + np.arange(ranks)])
    lp.a_matrix_.value_ = np.concatenate([np.ones(2 * parts), -np.ones(ranks)])
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.passModel(lp)
    return model


@dataclass(frozen=True)
class AffineScaling:
    """The program in standard form: parts, slacks, M and a big-M column that makes x = 1 feasible."""

    matrix: Floats  # [n + R, parts + R + 2]
    cost: Floats
    problem: SplitProblem

    @classmethod
    def build(cls, problem: SplitProblem) -> AffineScaling:
        ranks, experts, parts = len(problem.solo), len(problem.load), len(problem.expert)
        total = problem.solo.sum() + problem.load.sum()
        base = np.zeros((experts + ranks, parts + ranks + 1))
        base[problem.expert, np.arange(parts)] = 1
        base[experts + problem.rank, np.arange(parts)] = 1
        base[experts + np.arange(ranks), parts + np.arange(ranks)] = 1
        base[experts:, -1] = -1
        right = np.concatenate([problem.load, -problem.solo]) / total
        matrix = np.column_stack([base, right - base.sum(1)]).astype(np.float32)
        cost = np.zeros(matrix.shape[1], dtype=np.float32)
        cost[-2:] = 1, 1000
        return cls(matrix, cost, problem)

    def solve(self, steps: int = 5) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[parts] loads of the parts after so many steps, scaled to conserve; equal parts if it went wrong."""
        x = np.ones(self.matrix.shape[1], dtype=np.float32)
        for _ in range(steps):
            scaled = self.matrix * x**2
            try:
                factor = cho_factor(scaled @ self.matrix.T + 1e-12 * np.eye(len(scaled), dtype=np.float32))
            except np.linalg.LinAlgError:
                return self._finish(np.ones(len(self.problem.expert)))
            y = cho_solve(factor, scaled @ self.cost)
            d = x * (self.cost - self.matrix.T @ y)
            x = x * (1 - np.float32(0.999 / max(float(d.max()), 1e-9)) * d)
        failed = not np.isfinite(x).all() or x[-1] >= 1e-4
        parts = len(self.problem.expert)
        return self._finish(np.ones(parts) if failed else np.maximum(x[:parts], 0).astype(np.float64))

    def _finish(self, parts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray:
        problem = self.problem
        sums = np.bincount(problem.expert, parts, len(problem.load))
        return parts * (problem.load / np.where(sums > 0, sums, 1))[problem.expert]


class Rivals(NamedTuple):
    """Of each layer: microseconds of HiGHS and of affine scaling, the optimum, and how far affine scaling's split is
    above it, per cent."""

    highs: list[float]
    affine: list[float]
    optima: list[float]
    gaps: list[float]


def time_rivals(placement: isoload.Placement, loads: Tensor, layers: int) -> Rivals:
    """On loads [L, E], of the first so many layers; building a problem is not timed."""
    found = Rivals([], [], [], [])
    for layer in range(layers):
        slots = placement.slot_to_expert[layer].numpy()
        problem = split_problem(slots, loads[layer].numpy(), placement.topology.num_ranks)
        scaling, model = AffineScaling.build(problem), highs_model(problem)

        def run(model: highspy.Highs = model) -> None:
            model.clearSolver()  # no warm start
            model.run()

        found.highs.append(measure(run, 1, 0.01, 5).median)
        found.affine.append(measure(scaling.solve, 1, 0.01, 3).median)
        found.optima.append(model.getObjectiveValue())
        found.gaps.append(100 * (problem.peak(scaling.solve()) / found.optima[-1] - 1))
    return found
