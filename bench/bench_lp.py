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

import argparse
import sys
from collections.abc import Callable
from typing import Any

import highspy
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import isoload
from bench_plan import CASES, EXPERTS, LAYERS, make_case
from harness import machine, measure, over_instances, write_results
from isoload import ops
from rivals import AffineScaling, highs_model, split_problem

Solve = Callable[[torch.Tensor, isoload.ReplicaTables], Any]
SOLVERS: dict[str, Solve] = {
    "lp32": ops.plan_lp,
    "lp64": lambda loads, tables: ops.plan_lp(loads, tables, dtype=torch.float64),
    "exact": ops.plan_exact,
}


def time_solver(solve: Solve, loads: torch.Tensor, tables: isoload.ReplicaTables) -> dict[str, float]:
    """Microseconds per layer: of a call of all layers, and over single instances."""
    batch, single = measure(lambda: solve(loads, tables), LAYERS), []
    for layer in range(LAYERS):
        one = tables[layer]
        same = isoload.ReplicaTables(
            one.data.repeat(LAYERS, 1), one.num_ranks, one.num_experts, one.num_slots
        )
        copies = loads[layer].repeat(LAYERS, 1)
        single.append(measure(lambda s=same, c=copies: solve(c, s), LAYERS, 0.01, 5).median)
    alone = over_instances(single)
    return {"batch": batch.median, "single_median": alone.median, "single_p99": alone.p99}


def spread_of(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "max": float(np.max(values))}


def bench_rivals(placement: isoload.Placement, loads: torch.Tensor) -> tuple[dict[str, Any], np.ndarray]:
    """HiGHS and affine scaling; with the optimum of every layer."""
    highs, affine, optima, gaps = [], [], [], []
    for layer in range(LAYERS):
        slots = placement.slot_to_expert[layer].numpy()
        problem = split_problem(slots, loads[layer].numpy(), placement.topology.num_ranks)
        scaling, model = AffineScaling.build(problem), highs_model(problem)

        def run(model: highspy.Highs = model) -> None:
            model.clearSolver()  # no warm start
            model.run()

        highs.append(measure(run, 1, 0.01, 3).median)
        affine.append(measure(scaling.solve, 1, 0.01, 3).median)
        optima.append(model.getObjectiveValue())
        gaps.append(100 * (problem.peak(scaling.solve()) / optima[-1] - 1))
    times = {"highs_us": float(np.median(highs)), "affine_us": float(np.median(affine))}
    return {**times, "affine_gap": spread_of(np.array(gaps))}, np.array(optima)


def quality(
    split: ops.LpSplit, optima: np.ndarray, loads: torch.Tensor, tables: isoload.ReplicaTables
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
    console = Console(width=120)
    table = Table(title="The real-valued split (microseconds per layer, one core)", title_justify="left")
    names = ("R+replicas", "lp32", "p99", "lp64", "exact", "HiGHS", "affine x5")
    quality = ("iterations 32 / 64", "gap max 32 / 64", "affine gap mean/max")
    for name in (*names, *quality):
        table.add_column(name, justify="right")
    for r in rows:
        us, lp32, lp64 = r["plan_us"], r["reached"]["lp32"], r["reached"]["lp64"]
        table.add_row(
            f"{r['ranks']}+{r['replicas']}",
            f"{us['lp32']['batch']:.1f}",
            f"{us['lp32']['single_p99']:.1f}",
            f"{us['lp64']['batch']:.1f}",
            f"{us['exact']['batch']:.1f}",
            f"{r['highs_us']:.0f}",
            f"{r['affine_us']:.0f}",
            f"{lp32['iterations']['mean']:.1f} / {lp64['iterations']['mean']:.1f}",
            f"{lp32['gap']['max']:.0e} / {max(0, lp64['gap']['max']):.0e} %",
            f"{r['affine_gap']['mean']:.1f} / {r['affine_gap']['max']:.0f} %",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(__doc__.strip(), "\n", file=sys.stderr)
    print(machine(), file=sys.stderr)
    rows = [bench_case(ranks, replicas, options.seed) for ranks, replicas in CASES]
    show(rows)
    print("written:", write_results("bench_lp", rows).name)


if __name__ == "__main__":
    main()
