"""A training step whose routes are known: choosing micro-batches, planning ahead and borrowing, alone and together.

Fairness ledger
- Trace: 173 sequences of three tasks (law, intent, summary) on DeepSeek-V2-Lite (ESFT's router log), 26 layers, 64
  experts, top-6, one task after another, as one step of 12 micro-batches with equal numbers of sequences.
- order: "as they come" is consecutive sequences, "shuffled" the mean of 3 shuffles, "chosen" choose_micro_batches by
  the placement of the row.
- "in order": experts in order, no replicas. "eplb": one more slot per rank, placed on the step's own loads, which
  favours it. policy none, even (replicas share equally, as engines do) and exact need no weights; llep borrows into
  spare slots from the exact loads, with min_chunk 1 and threshold 1.0.
- imbalance: max/mean rank load, mean over micro-batches and layers. rows: distinct (token, other rank) pairs of a token
  in a layer, of every fifth layer. at_bound: part of the plans whose peak is proved to be the least of their slots.
- borrowed: experts per micro-batch and layer; MiB are those of DeepSeek-V2-Lite in bf16.
- choose_s: CPU seconds of choose_micro_batches. plan_ms: CPU milliseconds of one thread for a plan of one layer and
  micro-batch, of a call for all of them. Other work ran on the machine. Plans made with a gather have the same
  imbalance, because they have the same bits (a test).

Usage: python bench/bench_known_routes.py [--traces FOLDER] [--write]
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import isoload
from isoload import KnownRoutes, Placement, Topology, choose_micro_batches
from isoload.balancing.micro_batches import rank_loads, source_ranks
from isoload.traces import Trace, read_trace
from lib import table
from lib.harness import command, write_results
from lib.trace_files import add_traces, need

TASKS = ("law", "intent", "summary")
BATCHES, SHUFFLES, RANKS, EVERY = 12, 3, (8, 16), 5
EXPERT_MIB = 3 * 2048 * 1408 * 2 / 2**20
LLEP = {"min_chunk": 1, "threshold": 1.0}
# placement, spare slots, policy and its options
KINDS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("in order", 0, "none", {}),
    ("eplb", 0, "even", {}),
    ("eplb", 0, "exact", {}),
    ("in order", 1, "llep", LLEP),
    ("in order", 2, "llep", LLEP),
    ("in order", 4, "llep", LLEP),
)


def place(trace: Trace, ranks: int, kind: str, spare: int) -> Placement:
    slots = trace.num_experts // ranks + spare + (kind == "eplb")
    placer = "eplb" if kind == "eplb" else "trivial"
    counts = torch.from_numpy(trace.batch_counts().sum(0))
    placement = isoload.place(counts, Topology(ranks), slots, spare_slots=spare, placer=placer)
    return placement.with_rows(range(placement.num_layers), trace.layer_ids, trace.identity)


def rows_of(known: KnownRoutes, trace: Trace, plans: Any) -> float:
    """Distinct (token, other rank) pairs, per token and layer."""
    total, size = 0, known.placement.slots_per_rank
    batches, layers, ranks, _ = known.loads.shape
    for batch in range(batches):
        for rank in range(ranks):
            ids = torch.from_numpy(trace.topk_ids[known.tokens(batch, rank)]).long()
            for layer in range(0, layers, EVERY):
                made = plans[batch, layer]
                slots = isoload.route(ids[:, layer].contiguous(), made.loads, made.plan, rank)
                sent = torch.zeros(len(ids), ranks + 1, dtype=torch.bool)
                sent.scatter_(1, torch.where(slots < 0, ranks, slots // size), True)
                sent[:, rank] = False
                total += int(sent[:, :ranks].sum())
    return total / (len(trace.topk_ids) * len(range(0, layers, EVERY)))


def judge(known: KnownRoutes, trace: Trace, policy: str, options: dict[str, Any]) -> dict[str, float]:
    known.plans(policy, **options)  # which makes the tables that later steps find
    start = time.process_time()
    plans = known.plans(policy, **options)
    spent = time.process_time() - start
    mean = known.loads.sum((2, 3)) / known.placement.topology.num_ranks
    borrowed = float(plans.whole.telemetry[:, 0].double().mean()) if policy == "llep" else 0.0
    return {
        "imbalance": float((plans.peak / mean).mean()),
        "rows": rows_of(known, trace, plans),
        "borrowed": borrowed,
        "borrowed_mib": borrowed * EXPERT_MIB,
        "plan_ms": 1e3 * spent / mean.numel(),
        "at_bound": float((plans.peak == plans.bound).double().mean()),
    }


def bench(trace: Trace, ranks: int) -> list[dict[str, Any]]:
    rows, num = [], len(np.unique(trace.seq_id))
    consecutive = np.arange(num) * BATCHES // num
    shuffles = [np.random.default_rng(seed).permutation(consecutive) for seed in range(SHUFFLES)]
    for kind, spare, policy, options in KINDS:
        placement = place(trace, ranks, kind, spare)
        loads, sizes = rank_loads(trace, placement, None)
        start = time.process_time()
        chosen = choose_micro_batches(trace, placement, BATCHES).micro_batches
        spent = time.process_time() - start
        orders = {"as they come": [consecutive], "shuffled": shuffles, "chosen": [chosen]}
        for order, assignments in orders.items():
            figures = []
            for batches in assignments:
                sources = source_ranks(loads, sizes, batches, BATCHES, list(range(ranks)))
                known = KnownRoutes(trace, placement, micro_batches=batches, ranks=sources)
                figures.append(judge(known, trace, policy, options))
            where = {
                "ranks": ranks,
                "placement": kind,
                "spare_slots": spare,
                "policy": policy,
                "order": order,
            }
            means = {name: float(np.mean([row[name] for row in figures])) for name in figures[0]}
            rows.append(where | means | {"choose_s": spent if order == "chosen" else 0.0})
    return rows


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--write", action="store_true", help="bench/results/bench_known_routes.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"dsv2lite_esft_{task}" for task in TASKS]
    need(arguments.traces, *names)
    trace = read_trace([arguments.traces / f"{name}.npz" for name in names])
    rows = [row for ranks in RANKS for row in bench(trace, ranks)]
    table.show_rows("known routes", rows, "")
    if arguments.write:
        print(write_results("bench_known_routes", [{"table": "known routes", **row} for row in rows]))


if __name__ == "__main__":
    main()
