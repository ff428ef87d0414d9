"""Planning on one CPU core: the exact split against HiGHS and five-step affine scaling; share, count and route.

Fairness ledger
- Instances: E = 256, top-8, Zipf 0.8 popularity per layer; placed by `eplb` on the popularity before a drift of
  exp(0.5 N(0,1)) per expert; 1,000 to 200,000 global tokens, log-uniform. 58 layers.
- exact, 58 layers: one op call of all 58 instances, time / 58; median over calls.
- exact, p99: of the single instances: one op call of 58 copies of it (kinder to the branch predictor), time / 58.
- tolerance: the engines' default, exact with tolerance=0.001, against tolerance 0: the same call of all 58, by turns,
  and the median of the ratios; the largest peak / bound over the layers; the augmenting paths of a layer (mean) that
  the tolerance spares, and the copies that these move.
- ratios: a rival's time on an instance / ours on the same one, each repeated alone; median over instances.
- public call: isoload.plan(loads [E], placement, layer=...) in Python, checks and allocations included.
- HiGHS: its run() on a ready model, building excluded. It solves the real-valued program, we the integer one.
- affine scaling: five steps of the method SGLang's `lp` uses, our re-implementation on CPU (NumPy, float32, BLAS);
  building excluded. Its gap is that of its fractional split; sampling would come on top.
- imbalance: max / mean copies per rank; tiles: each slot's copies rounded up to --quantum rows first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import isoload
from isoload import ops
from isoload.engines.settings import TOLERANCE
from lib import table
from lib.harness import Timing, begin, command, measure, over_instances, read_results, write_results
from lib.result_tables import PLANNING, RANKS, TOLERANCES
from lib.rivals import time_rivals

EXPERTS, LAYERS, TOP_K = 256, 58, 8
CASES = [(16, 32), (32, 64), (64, 128), (128, 128)]  # ranks, replicas


def make_case(
    ranks: int, replicas: int, seed: int, drift: float = 0.5
) -> tuple[isoload.Placement, torch.Tensor]:
    """A placement of 58 layers and the loads [58, E] of one later batch, after a drift."""
    draw = np.random.default_rng(seed)
    zipf = 1 / np.arange(1, EXPERTS + 1) ** 0.8
    popularity = np.stack([draw.permutation(zipf) for _ in range(LAYERS)])
    topology = isoload.Topology(ranks, min(8, ranks))
    placement = isoload.place(popularity / zipf.sum() * 1e6, topology, (EXPERTS + replicas) // ranks)
    live = popularity * np.exp(drift * draw.standard_normal(popularity.shape))
    tokens = np.exp(draw.uniform(np.log(1e3), np.log(2e5), LAYERS)).astype(int)
    loads = [draw.multinomial(TOP_K * t, p / p.sum()) for t, p in zip(tokens, live, strict=True)]
    return placement, torch.tensor(np.stack(loads), dtype=torch.int32)


def tile_imbalance(quota: torch.Tensor, ranks: int, quantum: int) -> float:
    """Mean over layers of max/mean rank load when every slot's copies fill whole tiles."""
    tiles = (quota + quantum - 1) // quantum
    load = tiles.view(len(quota), ranks, -1).sum(-1).double()
    return float((load.amax(1) / load.mean(1)).mean())


def time_singles(
    solve: Callable[..., Any],
    loads: torch.Tensor,
    tables: isoload.ops.tables.ReplicaTables,
    least: int = 20,
) -> list[float]:
    """[58] microseconds of the single instances, each among copies of itself."""
    single = []
    for layer in range(LAYERS):
        one, copies = tables[layer], loads[layer].repeat(LAYERS, 1)
        same = replace(one, data=one.data.repeat(LAYERS, 1))
        single.append(measure(lambda s=same, c=copies: solve(c, s), LAYERS, 0.01, least).median)
    return single


def bench_exact(placement: isoload.Placement, loads: torch.Tensor) -> tuple[Timing, list[float], Timing]:
    """Per layer: a call of all 58; [58] medians of single instances; the public call, spread over instances."""
    tables = placement.layers("cpu").tables
    batch = measure(lambda: ops.plan_exact(loads, tables), LAYERS)
    single, public = time_singles(ops.plan_exact, loads, tables), []
    for layer in range(LAYERS):
        row = loads[layer].clone()
        public.append(measure(lambda r=row, i=layer: isoload.plan(r, placement, i), 1, 0.01).median)
    return batch, single, over_instances(public)


def bench_tolerance(ranks: int, replicas: int, seed: int) -> dict[str, Any]:
    """The engines' default tolerance against none: time, what the peak loses, paths and copies that it spares."""
    placement, loads = make_case(ranks, replicas, seed)
    tables = placement.layers("cpu").tables

    def plan(tolerance: float) -> Any:
        return ops.plan_exact(loads, tables, tolerance=tolerance)

    exact, near = plan(0.0), plan(TOLERANCE)
    assert bool((near.peak <= near.bound + near.bound * round(1e6 * TOLERANCE) // 1_000_000).all()), (
        "no certificate"
    )
    turns = np.array(
        [[measure(partial(plan, t), LAYERS, 0.02).median for t in (0.0, TOLERANCE)] for _ in range(25)]
    )
    return {
        "table": "tolerance",
        "ranks": ranks,
        "replicas": replicas,
        "exact_us": float(np.median(turns[:, 0])),
        "tolerance_us": float(np.median(turns[:, 1])),
        "ratio": float(np.median(turns[:, 1] / turns[:, 0])),
        "above_bound": float((near.peak / near.bound).max()) - 1,
        "paths": float(exact.telemetry[:, 1].float().mean()),
        "paths_spared": float((exact.telemetry[:, 1] - near.telemetry[:, 1]).float().mean()),
        "copies_spared": float((exact.quota - near.quota).abs().sum(1).float().mean()) / 2,
    }


def bench_rivals(placement: isoload.Placement, loads: torch.Tensor, ours: list[float]) -> dict[str, float]:
    """Medians over the layers that `ours` has times for; gaps of the affine scaling's split to the real-valued
    optimum, per cent."""
    found = time_rivals(placement, loads, len(ours))
    for layer, optimum in enumerate(found.optima):
        exact = ops.plan_exact(loads[layer], placement.layer(layer, "cpu").tables)
        assert int(exact.peak) == int(exact.bound) == int(np.ceil(optimum - 1e-6)), "not the optimum"
    return {
        "highs_us": float(np.median(found.highs)),
        "affine_us": float(np.median(found.affine)),
        "highs_ratio": float(np.median(np.divide(found.highs, ours))),
        "affine_ratio": float(np.median(np.divide(found.affine, ours))),
        "affine_gap_mean": float(np.mean(found.gaps)),
        "affine_gap_max": float(np.max(found.gaps)),
    }


def bench_tokens(placement: isoload.Placement, tokens: int = 4096) -> dict[str, float]:
    """count + share + route of one rank's tokens x 8, and the share row alone."""
    ranks = placement.topology.num_ranks
    draw = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, EXPERTS + 1) ** 0.8
    ids = [torch.multinomial(weights.expand(tokens, -1), TOP_K, generator=draw) for _ in range(ranks)]
    loads = torch.stack([isoload.count(row, EXPERTS) for row in ids])
    plan = isoload.plan(loads, placement, layer=0)

    def chain() -> None:
        isoload.count(ids[1], EXPERTS)
        isoload.route(ids[1], loads, plan, rank=1)  # makes its share row

    return {
        "share_row_us": measure(lambda: isoload.share(loads, plan, rank=1)).median,
        "count_share_route_us": measure(chain).median,
    }


def bench_case(ranks: int, replicas: int, quantum: int, rival_layers: int, seed: int) -> dict[str, Any]:
    placement, loads = make_case(ranks, replicas, seed)
    batch, single, public = bench_exact(placement, loads)
    alone = over_instances(single)
    plans = isoload.balancing.planning.plan_layers(loads, placement)
    even = isoload.balancing.planning.plan_layers(loads, placement, policy="even")
    mean = loads.sum(1).double() / ranks
    rivals = bench_rivals(placement, loads, single[:rival_layers])
    return {
        "ranks": ranks,
        "experts": EXPERTS,
        "replicas": replicas,
        "plan_us": {"batch": batch.median, "single_median": alone.median, "single_p99": alone.p99},
        "public_us": {"median": public.median, "p99": public.p99},
        **rivals,
        "imbalance": {"exact": float((plans.peak / mean).mean()), "even": float((even.peak / mean).mean())},
        "quantum": quantum,
        "tile_imbalance": {
            "exact": tile_imbalance(plans.quota, ranks, quantum),
            "even": tile_imbalance(even.quota, ranks, quantum),
        },
        **bench_tokens(placement),
    }


def show(rows: list[dict[str, Any]], quantum: int) -> None:
    """The split beside its rivals and what the tokens then cost; what was reached."""
    table.show("One layer, and the tokens of one rank, 4096 x 8 (microseconds, one core)", PLANNING, rows)
    reached = {
        "R+replicas": RANKS,
        "exact/even": "{imbalance[exact]:.3f} / {imbalance[even]:.3f}",
        f"in tiles of {quantum}": "{tile_imbalance[exact]:.3f} / {tile_imbalance[even]:.3f}",
        "affine gap max": "{affine_gap_max:.0f} %",
    }
    table.show("Imbalance reached", reached, rows)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--quantum", type=int, default=64, help="rows of a GEMM tile")
    parser.add_argument("--rival-layers", type=int, default=24, help="instances on which rivals run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("tolerance",), help="this table; the others stay as written")
    asked = parser.parse_args()
    begin(__doc__)
    rows = [row for row in read_results("bench_plan") if row.get("table") is None]
    if asked.only is None:
        rows = [bench_case(r, x, asked.quantum, asked.rival_layers, asked.seed) for r, x in CASES]
        show(rows, asked.quantum)
    rows += [bench_tolerance(r, x, asked.seed) for r, x in CASES]
    table.show("Tolerance 0.001 (microseconds)", TOLERANCES, rows[-len(CASES) :])
    print("written:", write_results("bench_plan", rows).name)


if __name__ == "__main__":
    main()
