"""Placing anew while loads drift: the Rebalancer under each placer, judged on the batches after each move.

Fairness ledger
- Stream: GLM-5.2's 48 recorded batches, domain after domain in shuffled order, three times over, 32 ranks of 9 slots.
  Every 4 batches a Rebalancer plans from those 4, and all layers move one batch later, whatever is gained.
- `once` is eplb's placement of the first 4 batches, kept. EPLB and CRAFT place anew from the last 4 batches alone, as
  engines do; `scenario` starts from where experts lie.
- Imbalance is max/mean rank load of the next batch, unseen, mean over layers and batches. "even": replicas
  share alike, as engines do; "exact": the least maximum. Slots changed: of all, per plan, of which each moves weights.

Usage: python bench/bench_rebalance.py --traces FOLDER [--write]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoload
from isoload.analysis.judge import even_imbalance, exact_imbalance
from isoload.online import Rebalancer, Recorder
from isoload.traces import read_trace
from lib import table
from lib.harness import command, write_results

EVERY, RANKS, SLOTS = 4, 32, 9
PLACERS: dict[str, dict[str, Any] | None] = {
    "once": None,
    "eplb": {"placer": "eplb", "moves": None},
    "craft": {"placer": "craft", "moves": None, "replicas": 8},
    "scenario": {"placer": "scenario", "split": "exact", "moves": None},
    "scenario, 8 moves": {"placer": "scenario", "split": "exact", "moves": 8},
}


def run(stream: np.ndarray, how: dict[str, Any] | None) -> dict[str, float]:
    layers, experts = stream.shape[1:]
    first = isoload.place(stream[:EVERY], isoload.Topology(RANKS), SLOTS, "eplb")
    balancers = [isoload.Balancer(first, i, tokens="same") for i in range(layers)]
    recorder, now = Recorder(layers, experts, max_batches=EVERY), first
    options = {"every": EVERY, "delay": 1, "layers_per_step": layers, "least_gain": 0.0, "split": "even"}
    rebalancer = None if how is None else Rebalancer(balancers, recorder, **{**options, **how})
    even, exact, changed = [], [], []
    for counts in stream[EVERY:]:
        placement = balancers[0].placement
        even.append(even_imbalance(placement, counts[None]).mean())
        exact.append(exact_imbalance(placement, counts[None]).mean())
        if placement is not now:
            changed.append(float((placement.slot_to_expert != now.slot_to_expert).float().mean()))
            now = placement
        if rebalancer is not None:
            for balancer, row in zip(balancers, counts, strict=True):
                recorder.add(balancer.layer, [torch.from_numpy(row)], balancer)
            rebalancer.step()
    if rebalancer is not None:
        rebalancer.close()
    return {
        "even": float(np.mean(even)),
        "exact": float(np.mean(exact)),
        "plans": len(changed),
        "changed": float(np.mean(changed or [0.0])),
    }


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of npz traces")
    parser.add_argument("--write", action="store_true", help="bench/results/bench_rebalance.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trace = read_trace(arguments.traces / "glm52_domains_a.npz")
    counts, names = trace.batch_counts(), np.asarray(trace.cluster)
    draw = np.random.default_rng(0)
    order = np.concatenate(
        [np.flatnonzero(names == domain) for _ in range(3) for domain in draw.permutation(np.unique(names))]
    )
    rows = [{"placer": label, **run(counts[order], how)} for label, how in PLACERS.items()]
    table.show_rows("placing anew", rows, "")
    table.losses(rows)
    if arguments.write:
        print(write_results("bench_rebalance", rows))


if __name__ == "__main__":
    main()
