"""Other ways to solve the split, for bench_plan: HiGHS, and five steps of primal affine scaling.

The affine scaling is policy lp_sampled's, our re-implementation on CPU (NumPy, float32, BLAS and LAPACK) of the method
that SGLang's `lp` dispatch runs in a CUDA kernel. It says how much arithmetic the method needs and how near it comes;
it says nothing about the speed of SGLang.
"""

from __future__ import annotations

from typing import NamedTuple

import highspy
import numpy as np
from torch import Tensor

import isoload
from isoload.policies.published import Parts, Program, movable_parts, scale, solve_layer, standard_form
from lib.harness import measure


def highs_model(problem: Parts) -> highspy.Highs:
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


class Rivals(NamedTuple):
    """Of each layer: microseconds of HiGHS and of affine scaling, the optimum, and how far affine scaling's split is
    above it, per cent."""

    highs: list[float]
    affine: list[float]
    optima: list[float]
    gaps: list[float]


def time_rivals(placement: isoload.Placement, loads: Tensor, layers: int) -> Rivals:
    """On loads [L, E], of the first so many layers; building a problem is not timed."""
    rivals = Rivals([], [], [], [])
    for slots, counts in zip(placement.slot_to_expert[:layers].numpy(), loads[:layers].numpy(), strict=True):
        base = np.zeros(placement.topology.num_ranks)
        problem = movable_parts(counts, slots, base, np.zeros(len(slots)))
        program, model = standard_form(problem), highs_model(problem)

        def run(model: highspy.Highs = model) -> None:
            model.clearSolver()  # no warm start
            model.run()

        def five_steps(program: Program = program, num_parts: int = len(problem.slot)) -> None:
            scale(program, num_parts, 5)

        rivals.highs.append(measure(run, 1, 0.01, 5).median)
        rivals.affine.append(measure(five_steps, 1, 0.01, 3).median)
        rivals.optima.append(model.getObjectiveValue())
        rivals.gaps.append(100 * (solve_layer(counts, slots, base, 5)[1] / rivals.optima[-1] - 1))
    return rivals
