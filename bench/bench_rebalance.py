"""Placing anew while loads drift: the Rebalancer under each placer, judged on the batches after each move.

Fairness ledger
- Stream: GLM-5.2's 48 recorded batches, domain after domain in shuffled order, three times over, 32 ranks of 9 slots.
  Every 4 batches a Rebalancer plans from those 4, and all layers move one batch later, whatever is gained.
- `once` is eplb's placement of the first 4 batches, kept. EPLB and CRAFT place anew from the last 4 batches alone, as
  engines do; `scenario` starts from where experts lie.
- Imbalance is max/mean rank load of the next batch, unseen, mean over layers and batches. "even": replicas
  share alike, as engines do; "exact": the least maximum. Slots changed: of all, per plan, of which each moves weights.

Second table: an engine's rebalances with ISOLOAD_REBALANCE="gain_ms=0" (move_ms=auto) and without, 20 intervals.
- Steady: every interval's copies are drawn from the mean of all recorded batches. Drifting: an interval is a batch
  of the stream above. An interval has 3,000 passes of 4,096 tokens a rank, all of which are counted.
- DeepSeek-V3's experts in FP8 on an H100 by arithmetic (600 TFLOP/s, 3.35 TB/s), nodes of 8 ranks joined by 50 GB/s,
  replicas split evenly. Gain and cost are modelled: the gain of a move is judged on the interval after it, the cost
  is that of the busiest rank's experts.

Usage: python bench/bench_rebalance.py [--traces FOLDER] [--write]
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

import isoload
from isoload.analysis.judge import ExpertSize, even_imbalance, exact_imbalance
from isoload.engines.tables import lay_out, placement_of
from isoload.engines.worth import NewMaps, RebalanceRule
from isoload.online import Rebalancer, Recorder
from isoload.online.metrics import Metrics
from isoload.times.exchanges import DEEPSEEK_V3_FP8
from lib import table
from lib.harness import command, write_results
from lib.trace_files import add_traces, need

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


PASSES, INTERVALS = 3000, 20
COPIES = 4096 * RANKS * 8 * PASSES  # of an interval and layer


def engine_run(stream: np.ndarray, placer: str, decides: bool) -> dict[str, float]:
    """Return the moves of 20 rebalances by the counts [batches, L, E] of the interval before each."""
    topology = isoload.Topology(RANKS, ranks_per_node=8)
    size, metrics = ExpertSize(DEEPSEEK_V3_FP8, DEEPSEEK_V3_FP8), Metrics()
    maps = NewMaps("bench", RebalanceRule(), size, PASSES, False, None, metrics)
    scaled = torch.from_numpy(stream / stream.sum(-1, keepdims=True) * COPIES).round().long()
    now = isoload.place(scaled[0], topology, SLOTS, "eplb").slot_to_expert.long()
    moves, gain, cost, changed = 0, 0.0, 0.0, 0.0
    for before, after in pairwise(scaled[1 : INTERVALS + 2]):
        slots = lay_out(before, topology, SLOTS, placer, now, maps if decides else None, PASSES)[0]
        if not torch.equal(slots, now):
            old, new = (placement_of(table, stream.shape[-1], topology) for table in (now, slots))
            worth = maps.worth(old, new, after, PASSES)
            moves, changed = moves + 1, changed + float((slots != now).float().mean())
            gain, cost, now = gain + worth.gain_ms * PASSES / 1e3, cost + worth.move_ms / 1e3, slots
    return {"moves": moves, "changed": changed / max(moves, 1), "gain_s": gain, "cost_s": cost}


def engine_rows(counts: np.ndarray, drifting: np.ndarray) -> list[dict[str, Any]]:
    draw = np.random.default_rng(1)
    shares = counts.sum(0) / counts.sum(0).sum(-1, keepdims=True)
    steady = np.stack([[draw.multinomial(COPIES, share) for share in shares] for _ in range(INTERVALS + 2)])
    rows = []
    for traffic, stream in (("steady", steady), ("drifting", drifting)):
        for placer in ("eplb", "scenario:least_gain=0", "scenario"):
            for decides in (False, True):
                rule = "gain_ms=0" if decides else "always"
                rows.append(
                    {
                        "traffic": traffic,
                        "placer": placer,
                        "rule": rule,
                        **engine_run(stream, placer, decides),
                    }
                )
    return rows


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--write", action="store_true", help="bench/results/bench_rebalance.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (trace,) = need(arguments.traces, "glm52_domains_a")
    counts, names = trace.batch_counts(), np.asarray(trace.cluster)
    draw = np.random.default_rng(0)
    order = np.concatenate(
        [np.flatnonzero(names == domain) for _ in range(3) for domain in draw.permutation(np.unique(names))]
    )
    rows = [{"placer": label, **run(counts[order], how)} for label, how in PLACERS.items()]
    table.show_rows("placing anew", rows, "")
    table.losses(rows)
    engines = engine_rows(counts, counts[order])
    table.show_rows("rebalances of an engine", engines, "")
    table.losses(engines)
    if arguments.write:
        print(write_results("bench_rebalance", rows + engines))


if __name__ == "__main__":
    main()
