"""Placer `scenario` with and without `near`: rows to other nodes and peak load of tokens that it has not seen.

Fairness ledger
- Traces: tokens of DeepSeek-V2-Lite (ESFT's router log, tasks law, intent and summary), gpt-oss-20b (decode) and OLMoE.
  Absent files are left out and named.
- Placed on the first half of a trace's tokens in eight batches, judged on the second half in eight batches; or placed
  on one task and judged on all tokens of another; or placed on the first or the last 300 tokens of OLMoE and judged on
  its others. Four or five layers of each, evenly spaced, all of OLMoE.
- Routing is isoload's own, `exact:objective=local`, consecutive tokens on a source rank. Rows are distinct
  (token, other node) pairs of a token, the unit of dispatch by nodes. "peak" is the busiest rank's copies over the mean
  under that policy; "even" is max/mean where replicas share alike, as engines do. Means over layers and batches.
- "rows_ratio" and "peak_ratio" are against the same placer with near=False in the same setting. The goals are this
  repository's own, and figures above them are marked LOSS. The mean over the settings is printed at the end.
- Tokens: placed on the first N tokens of the first half in eight batches, judged on the second half: how many tokens
  are enough. Both placers learn from the same tokens; "scenario" needs no per-token choices.
- Times: 256 experts and 20,000 drawn tokens, 30,000 changes tried in each layer. CPU seconds of a layer, over 8 layers,
  because other work ran on the machine; two_cpus_58_layers_s is 58 times that over 2 CPUs, not a measured wall clock.

Usage: python bench/bench_near.py [--traces FOLDER] [--only TABLE] [--write]
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoload
from isoload.analysis.judge import even_imbalance
from isoload.placers import scenario as near
from isoload.traces import Trace, read_trace
from lib import table
from lib.harness import command, read_results, write_results
from lib.trace_files import add_traces, present, rows_or_end

LAW, INTENT, SUMMARY = (f"dsv2lite_esft_{task}" for task in ("law", "intent", "summary"))
GPT, OLMOE = "gptoss20b_decode_mmlu", "olmoe_mmlu_small"
BATCHES, FEW = 8, 300
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS = {26: (1, 7, 13, 19, 25), 24: (2, 8, 14, 20)}  # of DeepSeek-V2-Lite and gpt-oss-20b
Ids = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Setting:
    """A trace to place on, one to judge on (None: the other part of it), nodes, ranks of each and slots of a rank."""

    placed: str
    judged: str | None
    nodes: int
    per_node: int
    slots: int
    goals: tuple[float, float] = (0.84, 1.005)  # of rows and peak
    part: str = "first half"


DRIFT = (0.9, 1.02)
SETTINGS = (
    Setting(LAW, None, 4, 4, 6),
    Setting(LAW, None, 2, 8, 6),
    Setting(LAW, None, 4, 2, 12),
    Setting(INTENT, None, 4, 4, 6),
    Setting(SUMMARY, None, 4, 4, 6),
    Setting(GPT, None, 4, 2, 6),
    Setting(GPT, None, 2, 4, 5),
    Setting(LAW, SUMMARY, 4, 4, 6, DRIFT, "all"),
    Setting(INTENT, LAW, 4, 4, 6, DRIFT, "all"),
    Setting(SUMMARY, INTENT, 4, 4, 6, DRIFT, "all"),
    Setting(OLMOE, None, 4, 4, 6, (1.0, 1.01), "first 300"),
    Setting(OLMOE, None, 4, 4, 6, (1.0, 1.01), "last 300"),
)


def parts(setting: Setting, folder: Path) -> tuple[Trace, Ids, int] | None:
    """The trace to place on, with eight batches, the tokens to judge on [tokens, L, K], and the experts."""
    names = [name for name in (setting.placed, setting.judged) if name]
    if len(present(folder, *names)) < len(names):
        return None
    whole = read_trace(path_of(folder, setting.placed))
    layers = LAYERS.get(whole.num_layers, tuple(range(whole.num_layers)))
    ids = whole.topk_ids[:, layers]
    half = {"first half": len(ids) // 2, "all": len(ids) // 2}.get(setting.part, FEW)
    seen, others = (ids[-half:], ids[:-half]) if setting.part == "last 300" else (ids[:half], ids[half:])
    if setting.judged is not None:
        others = read_trace(path_of(folder, setting.judged)).topk_ids[:, layers]
    sizes = np.array([len(part) for part in np.array_split(seen, BATCHES)])
    experts = whole.num_experts
    return Trace(whole.name, experts, topk_ids=seen, tokens_per_batch=sizes), others, experts


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.npz"


def judge(placement: isoload.Placement, ids: Ids, experts: int) -> dict[str, float]:
    """Rows to other nodes of a token, the peak of the exact split and the even imbalance, over layers and batches."""
    topology, size = placement.topology, placement.slots_per_rank
    ranks, rows, tokens, peaks, even = topology.num_ranks, 0, 0, [], []
    node = np.arange(ranks) // topology.ranks_per_node
    for part in np.array_split(ids, BATCHES):
        each = len(part) // ranks
        own = torch.from_numpy(np.ascontiguousarray(part[: each * ranks])).long()
        counts = np.stack([np.bincount(own[:, i].ravel(), minlength=experts) for i in range(ids.shape[1])])
        even.append(even_imbalance(placement, counts[None]).mean())
        for layer in range(ids.shape[1]):
            chosen = own[:, layer].reshape(ranks, each, -1)
            loads = torch.stack([isoload.count(row, num_experts=experts) for row in chosen])
            plan = isoload.plan(loads, placement, layer=layer, policy="exact", objective="local")
            peaks.append(float(plan.peak) * ranks / float(loads.sum()))
            for rank in range(ranks):
                slots = isoload.route(chosen[rank], loads, plan, rank=rank).numpy()
                sent = np.zeros((each, topology.num_nodes), bool)
                sent[np.arange(each)[:, None], node[slots // size]] = True
                sent[:, node[rank]] = False
                rows += int(sent.sum())
            tokens += each * ranks
    return {"rows": rows / tokens, "peak": float(np.mean(peaks)), "even": float(np.mean(even))}


def bench(setting: Setting, folder: Path) -> list[dict[str, Any]]:
    if (found := parts(setting, folder)) is None:
        return []
    seen, others, experts = found
    topology, rows = isoload.Topology(setting.nodes * setting.per_node, setting.per_node), []
    where = {
        "placed_on": f"{setting.placed}, {setting.part}",
        "judged_on": setting.judged or "its others",
        "nodes": setting.nodes,
        "ranks": topology.num_ranks,
        "slots": setting.slots,
    }
    for on in (False, True):
        placement = isoload.place(seen, topology, setting.slots, "scenario", near=on)
        figures = judge(placement, others, experts)
        rows.append({**where, "placer": "near" if on else "scenario", **figures})
    ratio = {f"{name}_ratio": rows[1][name] / rows[0][name] for name in ("rows", "peak", "even")}
    met = ratio["rows_ratio"] <= setting.goals[0] and ratio["peak_ratio"] <= setting.goals[1]
    rows[1] |= {**ratio, "goals": list(setting.goals), "met": met}
    return rows


def bench_tokens(name: str, folder: Path) -> list[dict[str, Any]]:
    """Rows and peak of placements that learn from few tokens up to half of the trace, on 4 nodes of 4 ranks."""
    if (found := parts(Setting(name, None, 4, 4, 6), folder)) is None:
        return []
    seen, others, experts = found
    rows = []
    for number in (*(n for n in TOKENS if n < len(seen.topk_ids)), len(seen.topk_ids)):
        sizes = np.array([len(part) for part in np.array_split(np.arange(number), BATCHES)])
        learnt = Trace(seen.name, experts, topk_ids=seen.topk_ids[:number], tokens_per_batch=sizes)
        figures = [
            judge(isoload.place(learnt, isoload.Topology(16, 4), 6, "scenario", near=on), others, experts)
            for on in (False, True)
        ]
        row: dict[str, Any] = {"trace": name, "tokens": number}
        for placer, figure in zip(("scenario", "near"), figures, strict=True):
            row |= {f"{placer}_{key}": value for key, value in figure.items()}
        rows.append(row)
    return rows


def bench_time() -> dict[str, Any]:
    """CPU seconds of layers of 256 experts on 4 nodes of 8 ranks, for 20,000 tokens with 8 choices of drawn skew."""
    draw = np.random.default_rng(0)
    layers, experts, tokens, batches = 8, 256, 20_000, 8
    wish = draw.normal(size=(layers, experts)).astype(np.float32)
    ids = np.empty((tokens, layers, 8), np.int32)
    for layer in range(layers):
        noise = draw.gumbel(size=(tokens, experts)).astype(np.float32)
        ids[:, layer] = np.argpartition(-(wish[layer] + noise), 8, axis=1)[:, :8]
    trace = Trace("drawn", experts, topk_ids=ids, tokens_per_batch=np.full(batches, tokens // batches))
    seconds = {}
    for on in (False, True):
        start = time.process_time()
        isoload.place(trace, isoload.Topology(32, 8), 9, "scenario", near=on)
        seconds[on] = (time.process_time() - start) / layers
    return {
        "experts": experts,
        "tokens": tokens,
        "changes": near.SWAP_STEPS,
        "scenario_cpu_s_a_layer": seconds[False],
        "near_cpu_s_a_layer": seconds[True],
        "two_cpus_58_layers_s": seconds[True] * 58 / 2,
        "load": os.getloadavg()[0],
        "goal_s": 60,
        "met": seconds[True] * 58 / 2 <= 60,
    }


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument(
        "--only", choices=("unseen", "tokens", "times"), help="one table; the others stay as written"
    )
    parser.add_argument("--write", action="store_true", help="bench/results/bench_near.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if arguments.only in (None, "unseen"):
        rows = [row for setting in SETTINGS for row in bench(setting, arguments.traces)]
        rows_or_end(rows, sorted({setting.placed for setting in SETTINGS}))
        table.show_rows("unseen tokens", rows, "")
        halves = [row["rows_ratio"] for row in rows if "rows_ratio" in row and "half" in row["placed_on"]]
        print(
            f"rows against scenario's, mean of the settings placed on a half: {np.mean(halves):.3f} (goal 0.82)"
        )
        rows = [{"table": "unseen", **row} for row in rows]
    if arguments.only in (None, "tokens"):
        learnt = [row for name in (LAW, SUMMARY) for row in bench_tokens(name, arguments.traces)]
        table.show_rows("tokens to learn from", learnt, "")
        rows += [{"table": "tokens", **row} for row in learnt]
    if arguments.only in (None, "times"):
        times = bench_time()
        table.show_rows("times", [times], "")
        rows.append({"table": "times", **times})
    table.losses([row for row in rows if "met" in row])
    if arguments.write:
        others = read_results("bench_near") if arguments.only else []
        print(write_results("bench_near", rows + [row for row in others if row["table"] != arguments.only]))


if __name__ == "__main__":
    main()
