"""GRACE-MoE's components one after the other on recorded tokens: rows that travel, load deviation, idle share.

Fairness ledger
- What it repeats: the paper's Figure 1 (grouping strictness against traffic) and Figure 5 (grouping, replication and
  routing), on 2 nodes of 2 ranks as there, and on 2 nodes of 4. Figures are counted from routed slots; no time is.
- Traces: tokens of DeepSeek-V2-Lite (ESFT's router log, three tasks, MIT), gpt-oss-20b (512 decode steps, Apache-2.0),
  OLMoE and Qwen3-30B-A3B (a few hundred tokens of a few requests: too few for groups, so read these with care). The
  paper's own models are OLMoE, DeepSeek-V2-Lite and Qwen3-30B-A3B, on WikiText. Absent files are left out and named.
- Seen and unseen: groups, replicas and weights from the first half of the tokens, figures of the second half, cut into
  batches of 1024 tokens (or all of it); sequences stay whole on a source rank.
- Groupings: experts in order (the paper's vanilla); at random (three draws, their mean); affinity groups of equal size
  (clusters cut to E/R); of any size (clusters as they come, over nodes and ranks: its fully non-uniform); controlled,
  the paper's knee (placer `grace`), and as Algorithm 3 is printed. Without replicas there is nothing to route.
- With replicas: `grace` replicates the heaviest rank's hot experts (Equation 2); routed by weights alone (its WRR), by
  locality first (its TAR), and by isoload's `exact`. `one replica` is its FR (section 5.3): the heaviest group's hot
  experts once more, on the least loaded rank. Fixed counts (Figure 1b) put the same number of experts on every rank,
  about as many replicas as `grace` makes: those with most copies, or with most partners. Last, isoload's
  `scenario:split=exact` under `exact`, without and with `near`, with as many slots of a layer as `grace` has in the
  mean, rounded up to the same number on every rank.
- Rows: distinct token x destination rank, as de-duplicated dispatch sends them, to other ranks (rank_rows) and those of
  them between nodes (node_rows); distinct token x other node, the paper's unit, as dispatch by nodes sends them between
  nodes (node_dispatch_rows). "change" is against experts in order.
  Deviation: standard deviation over ranks / mean; idle share: sum of (max - load) / (R * max).
- LOSS marks a row of GRACE that does not do what the paper says of it: groups that send no fewer rows to other nodes
  than experts in order, replicas that do not lower the deviation of the controlled groups, locality that sends no fewer
  rows to other nodes than weights alone.

Usage: python bench/bench_grace.py [--traces FOLDER] [--only VARIANT] [--write]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

import isoload
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.placers.base import make_scenarios
from isoload.placers.grace import bounded, clusters, co_activation, ragged
from isoload.traces import Trace, read_trace
from lib import table
from lib.harness import command, read_results, write_results
from lib.trace_files import add_traces, present, rows_or_end

FILES = (
    "dsv2lite_esft_intent",
    "dsv2lite_esft_law",
    "dsv2lite_esft_summary",
    "gptoss20b_decode_mmlu",
    "olmoe_mmlu_small",
    "qwen3_30b_pertoken_small",
)
SHAPES = ((2, 2), (2, 4))  # nodes, ranks of each
ROWS = ("rank_rows", "node_rows", "node_dispatch_rows")
FIGURES = (*ROWS, "deviation", "idle_share", "imbalance")
NODE_ROWS = "node_dispatch_rows"  # the paper's unit
Rows = list[dict[str, Any]]
Groups = list[list[int]]


@dataclass(frozen=True)
class Variant:
    """A row: its name, how to make the placements whose figures are averaged, and the policy."""

    name: str
    make: Callable[[], list[isoload.Placement]]
    policy: str


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """The first half of the tokens, and the second; a sequence is not cut."""
    ids, sequences = trace.topk_ids, trace.seq_id
    cut = len(ids) // 2
    while sequences is not None and 0 < cut < len(ids) and sequences[cut] == sequences[cut - 1]:
        cut += 1
    if cut == len(ids):
        cut = len(ids) // 2  # one sequence
    parts = (slice(0, cut), slice(cut, None))
    first, second = (
        Trace(
            trace.name,
            trace.num_experts,
            topk_ids=ids[part],
            seq_id=None if sequences is None else sequences[part],
            layer_ids=trace.layer_ids,
        )
        for part in parts
    )
    return first, second


def of_groups(layers: list[Groups], topology: isoload.Topology, trace: Trace) -> isoload.Placement:
    slots = ragged(layers)
    rows = torch.from_numpy(slots.reshape(len(slots), -1))
    return isoload.Placement(rows, topology, trace.num_experts, layer_ids=trace.layer_ids)


def at_random(trace: Trace, topology: isoload.Topology, seed: int) -> isoload.Placement:
    draw = np.random.default_rng(seed)
    layers = [
        [
            sorted(part.tolist())
            for part in np.array_split(draw.permutation(trace.num_experts), topology.num_ranks)
        ]
        for _ in range(trace.num_layers)
    ]
    return of_groups(layers, topology, trace)


def by_affinity(trace: Trace, topology: isoload.Topology, uniform: bool) -> isoload.Placement:
    """Clusters over nodes, then over each node's ranks: of equal size, or as they come."""
    scenarios, _ = make_scenarios(trace)
    nodes, ranks = topology.num_nodes, topology.ranks_per_node
    layers = []
    for layer in range(trace.num_layers):
        affinity = co_activation(scenarios, layer)
        groups: Groups = []
        for own in split(affinity, list(range(trace.num_experts)), nodes, uniform, least=ranks):
            groups += split(affinity, own, ranks, uniform, least=1)
        layers.append([sorted(group) for group in groups])
    return of_groups(layers, topology, trace)


def split(affinity: Any, experts: list[int], number: int, uniform: bool, least: int) -> Groups:
    found = clusters(affinity, experts, number)
    size = -(-len(experts) // number)
    return bounded(
        affinity, found, len(experts) // number if uniform else least, size if uniform else len(experts)
    )


def variants(seen: Trace, topology: isoload.Topology) -> Iterator[Variant]:
    @cache
    def placed(**options: Any) -> isoload.Placement:
        return isoload.place(seen, topology, placer="grace", **options)

    def held() -> float:
        """Slots of a rank that the placement of `grace` fills in the mean."""
        return int((placed().slot_to_expert >= 0).sum()) / (seen.num_layers * topology.num_ranks)

    def fixed(collaborative: bool) -> isoload.Placement:
        copies = (held() * topology.num_ranks - seen.num_experts) / (topology.num_ranks - 1)
        return placed(everywhere=max(1, round(copies)), collaborative=collaborative)

    def level(near: bool) -> isoload.Placement:
        return isoload.place(seen, topology, math.ceil(held()), "scenario", split="exact", near=near)

    per_rank = -(-seen.num_experts // topology.num_ranks)
    in_order = isoload.place(seen, topology, per_rank, "trivial")
    yield Variant("in order", lambda: [in_order], "none")
    yield Variant("random", lambda: [at_random(seen, topology, seed) for seed in range(3)], "none")
    yield Variant("affinity, equal", lambda: [by_affinity(seen, topology, True)], "none")
    yield Variant("affinity, any size", lambda: [by_affinity(seen, topology, False)], "none")
    yield Variant("affinity, controlled", lambda: [placed(replicate=False)], "none")
    yield Variant("affinity, as printed", lambda: [placed(replicate=False, printed=True)], "none")
    yield Variant("+ replicas, weights", lambda: [placed()], "grace:locality=False")
    yield Variant("+ replicas, locality", lambda: [placed()], "grace")
    yield Variant("+ replicas, exact", lambda: [placed()], "exact")
    yield Variant("one replica, weights", lambda: [placed(replicas=1)], "grace:locality=False")
    yield Variant("fixed count, weights", lambda: [fixed(False)], "grace:locality=False")
    yield Variant("collaborative, weights", lambda: [fixed(True)], "grace:locality=False")
    yield Variant("scenario, exact", lambda: [level(False)], "exact")
    yield Variant("near, exact", lambda: [level(True)], "exact")


def figures(judged: Trace, placement: isoload.Placement, policy: str) -> dict[str, float]:
    topology = placement.topology
    settings = ReplaySettings(
        topology.num_ranks,
        topology.ranks_per_node,
        placement.slots_per_rank,
        batch_tokens=1024,
        policies=(policy,),
    )
    row = replay(judged, settings, placement=placement).policies[0]
    return {
        "rank_rows": row.remote_rank_rows,
        "node_rows": row.remote_node_rows,
        "node_dispatch_rows": row.node_dispatch_rows,
        "deviation": row.rank_load_std,
        "idle_share": row.idle_share,
        "imbalance": row.imbalance_mean,
    }


def bench(trace: Trace, nodes: int, per_node: int, only: str | None = None) -> Rows:
    seen, judged = halves(trace)
    topology, rows = isoload.Topology(nodes * per_node, per_node), []
    for variant in variants(seen, topology):
        if only not in (None, variant.name) and variant.name != "in order":
            continue
        placements = variant.make()
        found = [figures(judged, placement, variant.policy) for placement in placements]
        rows.append(
            {
                "trace": trace.name,
                "tokens": len(judged.topk_ids),
                "nodes": nodes,
                "ranks": topology.num_ranks,
                "variant": variant.name,
                "slots": float(np.mean([(p.slot_to_expert >= 0).sum(1).float().mean() for p in placements])),
                **{name: float(np.mean([row[name] for row in found])) for name in FIGURES},
            }
        )
    for row in rows:
        row |= {f"{name}_change": row[name] / rows[0][name] - 1 for name in ROWS}
    if only is not None:
        return rows[1:]
    mark_losses({row["variant"]: row for row in rows})
    return rows


def mark_losses(rows: dict[str, dict[str, Any]]) -> None:
    """`met`: what the paper says of a component holds here; rows of which it says nothing have none."""
    controlled, weights = rows["affinity, controlled"], rows["+ replicas, weights"]
    for name in ("affinity, equal", "affinity, any size", "affinity, controlled"):
        rows[name]["met"] = rows[name][NODE_ROWS] < rows["in order"][NODE_ROWS]
    weights["met"] = weights["deviation"] < controlled["deviation"]
    locality = rows["+ replicas, locality"]
    locality["met"] = locality[NODE_ROWS] < weights[NODE_ROWS]


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--only", metavar="VARIANT", help="a variant's rows alone, written beside the others")
    parser.add_argument("--write", action="store_true", help="bench/results/bench_grace.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: Rows = []
    for path in present(arguments.traces, *FILES).values():
        trace = read_trace(path)
        for nodes, per_node in SHAPES:
            rows += bench(trace, nodes, per_node, arguments.only)
    rows_or_end(rows, FILES)
    table.show_rows("", rows, "met")
    table.losses(rows)
    if arguments.write:
        others = read_results("bench_grace") if arguments.only else []
        kept = [row for row in others if row["variant"] != arguments.only]
        keys = [(row["trace"], row["ranks"]) for row in kept or rows]
        order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        joined = sorted(kept + rows, key=lambda row: order[row["trace"], row["ranks"]])
        print(write_results("bench_grace", joined))


if __name__ == "__main__":
    main()
