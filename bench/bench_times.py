"""Modelled and measured time of the layer on CPU: `isoload measure`, then settings that were not fitted.

Fairness ledger
- The model is fitted in the same processes just before: experts, dispatch, combine and plans by
  `isoload.analysis.measuring`, with even exchanges and even loads of experts (its skewed points are held out).
- Settings are not part of the fit: skewed routing (hot_experts, heat 1 to 6) with 128 and 512 tokens a rank, placed by
  `eplb` from one batch and measured on another of the same popularity.
- Measured: wall time of a forward of `isoload.MoE` between barriers, of the slowest gloo process, median over rounds;
  policies alternate. One torch thread for each process. Processes may share cores: the fit is of wall time as well.
- Modelled: the slowest rank's experts, dispatch, combine and the plan, one after the other; the middle of the range.

Usage: python bench/bench_times.py [--ranks R] [--rounds N]     writes bench/results/bench_times.jsonl
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import isoload
from bench_layer import EXPERTS, HIDDEN, INNER, TOP_K
from isoload.analysis.measuring import make_machine, measure
from isoload.analysis.models import Model
from isoload.analysis.timeline import rows_between
from isoload.balancing.planning import plan_layers, share_routed
from isoload.cli.processes import run_ranks
from isoload.transport import CollectiveTransport
from isoload.weights.experts import ExpertWeights
from lib import table
from lib.harness import begin, command, write_results
from workloads import make_workload

GIB = 2.0**30
POLICIES = ("no replicas", "none", "static", "exact")
SETTINGS = tuple(itertools.product((1, 3, 6), (128, 512)))  # heat of the hot experts, tokens a rank
MODEL = Model("bench_layer", HIDDEN, INNER, EXPERTS, TOP_K, 1, "float32", 0)


def run_rank(rank: int, alive: Callable[[], None], ranks: int, rounds: int) -> list[dict[str, Any]]:
    """The body of one process: a row for each setting and policy."""
    torch.set_num_threads(1)
    times = measure(make_machine(MODEL, 2 * GIB), lambda done, total: alive())
    layer_time, _ = times.layer(ranks, 1, TOP_K)
    draw = torch.Generator().manual_seed(0)
    dense, topology = ExpertWeights.random(EXPERTS, HIDDEN, INNER, generator=draw), isoload.Topology(ranks)
    transport, rows = CollectiveTransport(topology), []
    for heat, tokens in SETTINGS:
        shape = {"num_ranks": ranks, "num_experts": EXPERTS, "top_k": TOP_K, "tokens_per_rank": tokens}
        workload = make_workload("hot_experts", **shape, num_hot=4, heat=heat)
        before, ids = workload.topk_ids(0), workload.topk_ids(1)
        counts = sum(isoload.count(i, EXPERTS) for i in before)[None]
        loads = torch.stack([isoload.count(i, EXPERTS) for i in ids])[None]
        x, gates = torch.randn(tokens, HIDDEN, generator=draw), torch.full((tokens, TOP_K), 1 / TOP_K)
        layers, modelled = {}, {}
        for name in POLICIES:
            policy = "none" if name == "no replicas" else name
            placement = isoload.place(counts, topology, EXPERTS // ranks + (name != "no replicas"))
            gate = partial(lambda rows, answer: answer, answer=(ids[rank], gates))
            layers[name] = isoload.MoE(gate, dense, transport, placement, policy=policy)
            sent = share_routed(loads, plan_layers(loads, placement, policy), None).numpy()
            received = rows_between(sent, tokens, ranks).sum(1)
            span = layer_time.seconds(sent.sum(1).reshape(1, ranks, -1), received, tokens)[0]
            plans = times.plan_us["exact"] if name in ("static", "exact") else 0.0
            modelled[name] = 1e3 * float(span.mean()) + 1e-3 * plans
        samples: dict[str, list[float]] = {name: [] for name in POLICIES}
        for turn in range(rounds + 2):
            for name in POLICIES:
                dist.barrier()
                start = time.perf_counter_ns()
                with torch.no_grad():
                    layers[name]([x])
                took = (time.perf_counter_ns() - start) / 1e6
                if turn >= 2:
                    samples[name].append(took)
                alive()
        where = {"ranks": ranks, "heat": heat, "tokens": tokens}
        rows += [
            where | {"policy": name, "modelled": modelled[name], "ms": samples[name]} for name in POLICIES
        ]
    return rows


def ordered_pairs(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of policies of a setting that differ by more than 10 %: those in the modelled order, and all."""
    right = total = 0
    for a, b in itertools.combinations(rows, 2):
        same = (a["heat"], a["tokens"]) == (b["heat"], b["tokens"])
        if same and max(a["measured"], b["measured"]) > 1.1 * min(a["measured"], b["measured"]):
            total += 1
            right += (a["measured"] < b["measured"]) == (a["modelled"] < b["modelled"])
    return right, total


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="forwards of a policy and setting")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    asked = parser.parse_args()
    begin(__doc__)
    body, rows = partial(run_rank, ranks=asked.ranks, rounds=asked.rounds), []
    for each in zip(*run_ranks(body, asked.ranks, 300.0), strict=True):
        measured = float(np.median(np.max([row["ms"] for row in each], axis=0)))
        row = {key: value for key, value in each[0].items() if key != "ms"} | {"measured": measured}
        rows.append(row | {"error": row["modelled"] / measured - 1})
    table.show_rows("a forward, ms", rows)
    right, total = ordered_pairs(rows)
    print(f"median error {100 * np.median([abs(row['error']) for row in rows]):.1f} %")
    print(f"order of policies that differ by more than 10 %: {right} of {total} pairs right")
    print("written:", write_results("bench_times", rows).name)


if __name__ == "__main__":
    main()
