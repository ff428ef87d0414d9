"""A lower bound of spill_cost's objective, by linear programming."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from support.level_cases import LevelCase


def least_cost_bound(case: LevelCase, import_cost: int, gap: float = 0.002) -> float:
    """A proved lower bound of the largest cost over all plans: HiGHS on copies t[e, r] and imports y[e, r]."""
    ranks, experts, home = case.num_ranks, len(case.loads), case.home // case.size
    cells = experts * ranks
    t = np.arange(cells).reshape(experts, ranks)
    y, top = t + cells, 2 * cells
    rows = experts + 2 * ranks + cells
    matrix, low, high = lil_matrix((rows, top + 1)), np.full(rows, -np.inf), np.zeros(rows)
    for e, n in enumerate(case.loads):  # all copies are computed
        matrix[e, t[e]] = 1
        low[e] = high[e] = n
    for r in range(ranks):  # no rank above the top; no more imports than spare slots
        away = home != r
        matrix[experts + r, t[:, r]] = 1
        matrix[experts + r, y[away, r]] = import_cost
        matrix[experts + r, top] = -1
        matrix[experts + ranks + r, y[away, r]] = 1
        high[experts + ranks + r] = case.spare
    for i in range(cells):  # copies away from home need an import
        e, r = divmod(i, ranks)
        matrix[experts + 2 * ranks + i, [t[e, r], y[e, r]]] = [1, -float(case.loads[e])]
        if home[e] == r:
            matrix[experts + 2 * ranks + i, y[e, r]] = 0
            high[experts + 2 * ranks + i] = np.inf
    goal, kinds, most = np.zeros(top + 1), np.zeros(top + 1), np.full(top + 1, np.inf)
    goal[top] = 1
    kinds[cells:top], most[cells:top] = 1, 1
    found = milp(
        goal,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=kinds,
        bounds=Bounds(0, most),
        options={"mip_rel_gap": gap},
    )
    return float(found.mip_dual_bound)
