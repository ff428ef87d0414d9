"""The real-valued split on one CPU core: plan_lp beside plan_exact, HiGHS and five-step affine scaling.

Fairness ledger
- Instances: those of bench_plan: E = 256, top-8, Zipf 0.8, placed by `eplb` before a drift of 0.5; 58 layers.
- lp32, lp64: one op call of all 58 instances, time / 58; median over calls. float32 to 1e-4, float64 to 1e-8.
- p99: of the single instances: one op call of 58 copies of it (kinder to the branch predictor), time / 58.
- exact: the integers' optimum, measured in the same way. It solves the harder problem and is the faster one.
- HiGHS: its run() on a ready model, building excluded, to its own 1e-7.
- affine scaling: five steps of the method SGLang's `lp` uses, our re-implementation on CPU (NumPy, float32, BLAS);
  building excluded.
- gaps: of the split's largest rank to HiGHS's optimum, per cent; rounded: the quota of round_split to exact's peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import isoload
from bench_plan import CASES, EXPERTS, LAYERS, make_case, time_singles
from isoload import ops
from lib import table
from lib.harness import begin, command, measure, over_instances, write_results
from lib.result_tables import LP
from lib.rivals import time_rivals

Solve = Callable[[torch.Tensor, isoload.ops.tables.ReplicaTables], Any]
SOLVERS: dict[str, Solve] = {
    "lp32": ops.plan_lp,
    "lp64": lambda loads, tables: ops.plan_lp(loads, tables, dtype=torch.float64),
    "exact": ops.plan_exact,
}


def time_solver(
    solve: Solve, loads: torch.Tensor, tables: isoload.ops.tables.ReplicaTables
) -> dict[str, float]:
    """Microseconds per layer: of a call of all layers, and over single instances."""
    batch = measure(lambda: solve(loads, tables), LAYERS)
    alone = over_instances(time_singles(solve, loads, tables, 5))
    return {"batch": batch.median, "single_median": alone.median, "single_p99": alone.p99}


def spread_of(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "max": float(np.max(values))}


def bench_rivals(placement: isoload.Placement, loads: torch.Tensor) -> tuple[dict[str, Any], np.ndarray]:
    """HiGHS and affine scaling; with the optimum of every layer."""
    found = time_rivals(placement, loads, LAYERS)
    times = {"highs_us": float(np.median(found.highs)), "affine_us": float(np.median(found.affine))}
    return {**times, "affine_gap": spread_of(np.array(found.gaps))}, np.array(found.optima)


def quality(
    split: ops.LpSplit, optima: np.ndarray, loads: torch.Tensor, tables: isoload.ops.tables.ReplicaTables
) -> Any:
    """Iterations, statuses, gap to the optimum, and what rounding adds to exact's peak."""
    quota = ops.round_split(split.split, loads, tables)
    peak = quota.view(len(quota), tables.num_ranks, -1).sum(-1).amax(-1).numpy()
    exact = ops.plan_exact(loads, tables).peak.numpy()
    return {
        "iterations": spread_of(split.iterations.numpy()),
        "not_converged": int((split.status != 0).sum()),
        "gap": spread_of(100 * (split.primal.double().numpy() / optima - 1)),
        "certified_gap": spread_of(100 * (1 - split.dual.double() / split.primal.double()).numpy()),
        "rounded_copies_over_exact": spread_of(peak - exact),
    }


def bench_case(ranks: int, replicas: int, seed: int) -> dict[str, Any]:
    placement, loads = make_case(ranks, replicas, seed)
    tables = placement.layers("cpu").tables
    times = {name: time_solver(solve, loads, tables) for name, solve in SOLVERS.items()}
    rivals, optima = bench_rivals(placement, loads)
    reached = {
        name: quality(SOLVERS[name](loads, tables), optima, loads, tables) for name in ("lp32", "lp64")
    }
    case = {"ranks": ranks, "experts": EXPERTS, "replicas": replicas}
    return {**case, "plan_us": times, **rivals, "reached": reached}


def show(rows: list[dict[str, Any]]) -> None:
    more = {
        "p99": "{plan_us[lp32][single_p99]:.1f}",
        "iterations, lp64": "{reached[lp64][iterations][mean]:.1f}",
        "gap max, lp64": "{reached[lp64][gap][max]:.1e}",
        "affine gap mean/max": "{affine_gap[mean]:.1f} / {affine_gap[max]:.0f} %",
    }
    table.show("The real-valued split (microseconds per layer, one core)", {**LP, **more}, rows)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begin(__doc__)
    rows = [bench_case(ranks, replicas, asked.seed) for ranks, replicas in CASES]
    show(rows)
    print("written:", write_results("bench_lp", rows).name)


if __name__ == "__main__":
    main()
