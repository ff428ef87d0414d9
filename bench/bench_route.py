"""Rows that leave ranks and nodes under GRACE-MoE's locality-first routing, and what the busiest rank then carries.

Fairness ledger
- Streams: bench/lib/streams.py, 8 ranks on 2 nodes; without --traces the shipped cut of gpt-oss-20b. First halves
  calibrate.
- Placements: `eplb` with one slot more per 8 experts of a rank, at least one; `grace` (groups by co-activation, as many
  replicas as it takes; not where tokens are drawn). Both have weights by the predicted loads. All policies share one.
- weighted random = grace_sampled:locality=False (Algorithm 4), locality-first = grace_sampled (Algorithm 5), both of
  lib/published_policies.py; grace cuts in the same proportions. exact:objective=local has the given tolerance over
  the least peak.
- All figures are counted from routed slots (isoload.analysis): rows = distinct token x destination rank, per token and
  layer; node_dispatch_rows = distinct token x other node, as dispatch by nodes sends them. Deviation of the rank loads
  over their mean, mean; idle = sum(max - load) / (R max). saved = rows between nodes less than weighted random, % of
  those that locality-first saves. No figure is a time.
- LOSS: exact:objective=local saves less than half of that, or ends above locality-first's imbalance.

Usage: python bench/bench_route.py [--traces FOLDER] [--write]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import isoload
from isoload.analysis.simulate import ReplaySettings, default_slots_per_rank, replay
from lib import table
from lib.harness import command, machine, write_results
from lib.published_policies import registered
from lib.result_tables import ROUTE
from lib.streams import SEED, Stream, parts, streams

NODES = 2
RANDOM, FIRST = "grace_sampled:locality=False", "grace_sampled"
LOCAL = tuple(f"exact:objective=local:tolerance={part}" for part in ("0.0", "0.05", "0.1", "0.2"))
POLICIES = ("none", "static", RANDOM, FIRST, "grace", "exact", *LOCAL)
FIGURES = {
    "imbalance": "imbalance_mean",
    "imbalance_p99": "imbalance_p99",
    "deviation": "rank_load_std",
    "idle": "idle_share",
}
ROWS = {  # per token and layer
    "rank_rows": "remote_rank_rows",
    "node_rows": "remote_node_rows",
    "node_dispatch_rows": "node_dispatch_rows",
}
Row = dict[str, Any]


def bench(stream: Stream, placer: str, most: int) -> list[Row]:
    """A row per policy on one placement."""
    seen, fresh = parts(stream)
    topology = isoload.Topology(stream.ranks, stream.ranks // NODES)
    slots = None if placer == "grace" else default_slots_per_rank(seen.num_experts, stream.ranks)
    placement = isoload.place(seen, topology, slots, placer)
    settings = ReplaySettings(
        stream.ranks,
        stream.ranks // NODES,
        batch_tokens=stream.tokens,
        max_batches=most,
        assign="round-robin" if stream.deal == "even" else "contiguous",
        seed=SEED,
        policies=POLICIES,
    )
    with registered():
        found = replay(fresh, settings, placement=placement)
    rows = [
        {
            "trace": stream.name,
            "deal": stream.deal,
            "placer": placer,
            "replicas": int((placement.slot_to_expert >= 0).sum()) / placement.num_layers
            - placement.num_experts,
            "policy": figures.policy,
            **{name: getattr(figures, field) for name, field in FIGURES.items()},
            **{name: getattr(figures, field) / found.tokens / found.layers for name, field in ROWS.items()},
        }
        for figures in found.policies
    ]
    left = {row["policy"]: row["node_rows"] for row in rows}
    gain = left[RANDOM] - left[FIRST]
    return [row | {"saved": (left[RANDOM] - row["node_rows"]) / gain if gain else 0.0} for row in rows]


def losses(rows: list[Row]) -> list[str]:
    """Where the exact split does not save most of it at a lower peak."""
    first = {(r["trace"], r["deal"], r["placer"]): r for r in rows if r["policy"] == FIRST}
    found = []
    for row in rows:
        if row["policy"] in LOCAL:
            peak = first[row["trace"], row["deal"], row["placer"]]["imbalance"]
            if row["saved"] < 0.5 or row["imbalance"] > peak:
                where = f"{row['trace']}, {row['deal']}, {row['placer']}: {row['policy']}"
                found.append(
                    f"LOSS {where}: saves {row['saved']:.0%}, imbalance {row['imbalance']:.3f} for {peak:.3f}"
                )
    return found


def show(rows: list[Row]) -> None:
    for deal in dict.fromkeys(row["deal"] for row in rows):
        table.show(f"tokens dealt: {deal}", ROUTE, [row for row in rows if row["deal"] == deal])
    print(*losses(rows), sep="\n")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of npz traces; missing ones are named")
    parser.add_argument("--max-batches", type=int, default=0, help="of every stream; 0 = all")
    parser.add_argument("--write", action="store_true", help="bench/results/bench_route.jsonl")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for stream in streams(arguments.traces):
        if stream.ranks == 8:
            for placer in ("eplb", "grace") if stream.per_token else ("eplb",):
                rows += bench(stream, placer, arguments.max_batches)
    show(rows)
    print(machine())
    if arguments.write:
        print(f"written: {write_results('bench_route', rows)}")


if __name__ == "__main__":
    main()
