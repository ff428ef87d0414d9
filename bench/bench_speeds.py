"""What it is worth to know that ranks differ in speed: time of the busiest rank, with and without the speeds.

Fairness ledger
- Instances: those of bench_plan.py (256 experts, top-8, Zipf 0.8, drift after the placement, 58 layers), placed by
  `eplb` and by `scenario` on the popularity before the drift.
- Speeds: one rank at 0.9 of the others, or all ranks drawn from a normal distribution with a deviation of 3 %.
- A rank takes its copies over its speed. Figures are the time of the busiest rank over that of ranks that all end
  together (all copies over the sum of speeds), means over the layers. Copies are counted, nothing is timed: kernels
  whose time is not proportional to copies gain less.
- "nothing" knows no speeds; "plan" has them in policy `exact`, on the placement made without them; "placement" has them
  in the placer alone; "both" in both. tests/ops/test_plan_exact.py compares the peak with max-flow's.

Usage: python bench/bench_speeds.py     writes bench/results/bench_speeds.jsonl
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import isoload
from bench_plan import EXPERTS, LAYERS, make_case
from isoload.balancing.planning import plan_layers
from lib import table
from lib.harness import begin, command, write_results
from lib.result_tables import SPEEDS

CASES = ((16, 32), (64, 128))  # ranks, replicas
KNOWS = {"nothing": (False, False), "plan": (False, True), "placement": (True, False), "both": (True, True)}


def speeds_of(kind: str, ranks: int) -> list[float]:
    if kind == "one at 0.9":
        return [0.9] + [1.0] * (ranks - 1)
    return np.random.default_rng(1).normal(1, 0.03, ranks).round(4).tolist()


def over_level(loads: torch.Tensor, placement: isoload.Placement, speeds: list[float]) -> float:
    """The busiest rank's time over that of ranks that all end together, mean over the layers of loads [58, E]."""
    quota = plan_layers(loads, placement).quota.view(LAYERS, len(speeds), -1).sum(2).double()
    seconds = (quota / torch.tensor(speeds, dtype=torch.float64)).amax(1)
    return float((seconds * sum(speeds) / loads.sum(1)).mean())


def bench(kind: str, ranks: int, replicas: int, placer: str) -> dict[str, Any]:
    speeds = speeds_of(kind, ranks)
    placement, loads = make_case(ranks, replicas, 0)
    popularity = make_case(ranks, replicas, 0, drift=0.0)[1]
    even = placement.topology
    topologies = {False: even, True: isoload.Topology(ranks, even.ranks_per_node, speeds=tuple(speeds))}
    row: dict[str, Any] = {"speeds": kind, "ranks": ranks, "replicas": replicas, "placer": placer}
    for name, (placing, planning) in KNOWS.items():
        made = isoload.place(popularity, topologies[placing], (EXPERTS + replicas) // ranks, placer)
        row[name] = over_level(loads, replace(made, topology=topologies[planning]), speeds)
    return row


def main() -> None:
    command(__doc__).parse_args()
    begin(__doc__)
    torch.set_num_threads(1)
    kinds = ("one at 0.9", "3 % deviation")
    rows = [bench(kind, *case, placer) for kind in kinds for case in CASES for placer in ("eplb", "scenario")]
    table.show("Time of the busiest rank over that of ranks that all end together", SPEEDS, rows)
    print("written:", write_results("bench_speeds", rows).name)


if __name__ == "__main__":
    main()
