"""Imbalance of fills made ahead, by how well the next batch is predicted: libra, hedge, and what they are compared to.

Fairness ledger
- Streams: bench/lib/streams.py. Nothing of the first halves, which calibrate, is counted.
- Experts lie in their order, E / R per rank, without replicas; N spare slots per rank. `eplb` has N more resident slots
  per rank and layer instead, placed by the calibration's loads: memory that the others need once for all layers.
- Predictions: perfect; a number = that part of the true choices, the others drawn from the calibration's counts or
  (partner) each always the same wrong expert; last = the batch before; linear, path = fitted on the calibration's
  tokens (not where tokens are drawn); popularity = the calibration's shares. All policies get the same one; lina three
  of them, path is its own.
- llep (min_chunk=1, threshold=0) and harmoeny plan from the true loads: what a fill in time could reach.
- lina and harmoeny are re-implementations from their papers (published_ahead.py); HarMoEny's ranks fetch as many
  experts as they like, here N. eplb dynamic draws its replicas, counted from routed slots.
- imbalance = max / mean rank load, over (layer, batch). local = part of the copies computed on their source rank.
  imports = experts borrowed per rank and batch; their bytes are bfloat16 weights. No figure of these is a time.
- even: tokens dealt one by one; sequence: whole sequences to a rank; own: as the workload has them.
- traffic: rows that leave their rank, once per token and rank, in bfloat16, one way; all-gather: every row to every
  other rank, with its expert ids and weights (8 bytes each), as Libra's dispatch does. First batches alone.
- accuracy: the part of a token's true experts that is among the K predicted, fitted on the first halves; of one ESFT
  task also where nothing of that task was seen.

Usage: python bench/bench_libra.py [--traces FOLDER] [--only TABLE]   (npz files; missing ones are printed)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload.analysis.batches import SourceBatch
from isoload.analysis.metrics import count_routed
from isoload.analysis.prediction import Forecast
from isoload.balancing import planning
from isoload.balancing import prediction as predict
from isoload.policies import Policy, make_policy, parse_policy
from isoload.policies.shared import rank_copies
from isoload.traces import read_trace
from isoload.traces.record import Ints
from lib import table
from lib.harness import command, machine, read_results, write_results
from lib.path_table import PathForecast, accuracy, tabulate
from lib.published_ahead import HarmoenyPolicy, LinaPolicy
from lib.result_tables import by
from lib.streams import FILES, SEED, TASKS, Stream, parts, streams, workloads
from lib.trace_files import add_traces, present, rows_or_end

SPARE = (1, 2, 4, 8)
PARTS = ("0.9", "0.8", "0.45", "0.12")
PREDICTIONS = ("perfect", *PARTS, *(f"{p} partner" for p in PARTS), "last", "linear", "path", "popularity")
FITTED = ("linear", "path")
FEW = ("perfect", "0.8", "0.45", "last")  # of the made workloads
AHEAD = ("libra_published", "libra", "hedge")
HELD = "hedge held"  # local copies stay, as in a stack that computes them before the plan
LINA = ("perfect", "path", "popularity")  # the forecasts of `lina`: its own, and those that need no fit
IN_TIME = ("none", "llep:min_chunk=1:threshold=0", "harmoeny")
RESIDENT = ("static", "dynamic", "exact")
TRAFFIC_BATCHES, DIGITS = 4, 6
Row = dict[str, Any]


RIVALS: dict[str, Policy] = {"lina": LinaPolicy(), "harmoeny": HarmoenyPolicy()}


def policy_of(text: str) -> Policy:
    return RIVALS[text] if text in RIVALS else make_policy(*parse_policy(text))


class PartnerForecast(Forecast):
    """A mistaken choice becomes its expert's partner, the same one always."""

    def wrong(self, chosen: Ints, stream: np.random.Generator) -> Ints:
        num_experts = self.popularity.shape[1]
        turn = np.random.default_rng(SEED).permutation(num_experts)  # a cycle: no expert is its own partner
        partner = np.empty(num_experts, np.int32)
        partner[turn] = np.roll(turn, 1)
        return partner[chosen.clip(0)]


def forecasts(stream: Stream) -> dict[str, Forecast]:
    found = {}
    for kind in FEW if stream.deal == "own" else PREDICTIONS:
        text, *partner = kind.split()
        data = stream.trace, stream.batches, stream.fold, SEED
        if not stream.per_token and kind in FITTED:
            continue
        if kind == "path":
            found[kind] = PathForecast(*data)
        else:
            found[kind] = PartnerForecast(text, *data) if partner else Forecast(text, *data)
    return found


def place(stream: Stream, slots: int, placer: str) -> isoload.Placement:
    """In order with so many spare slots, or by another placer with so many more resident ones."""
    trace, counts = stream.trace, stream.batches.counts[list(stream.fold.calibrate)]
    size = -(-trace.num_experts // stream.ranks) + slots
    spare = slots if placer == "trivial" else 0
    return isoload.place(counts, isoload.Topology(stream.ranks), size, placer, spare_slots=spare)


def routed_slots(plan: isoload.policies.plan.Plan, loads: Tensor, batch: SourceBatch) -> Tensor:
    """[L, T, K]."""
    layers, ranks = range(len(loads)), range(batch.num_ranks)
    return torch.stack(
        [torch.cat([isoload.route(batch.on_rank(i, r), loads[i], plan[i], r) for r in ranks]) for i in layers]
    )


def copies_of(plan: isoload.policies.plan.Plan, loads: Tensor, batch: SourceBatch) -> Tensor:
    """[L, R, R] copies from source to rank; a sampled plan's are counted from routed slots."""
    if plan.quota is not None:
        return rank_copies(loads, plan)
    ranks, size = batch.num_ranks, plan.placed.host.slots_per_rank
    sources = torch.from_numpy(batch.sources())[:, None]
    pairs = sources * ranks + routed_slots(plan, loads, batch) // size
    return torch.stack([torch.bincount(layer.flatten(), minlength=ranks**2) for layer in pairs]).view(
        -1, ranks, ranks
    )


def figures(plan: isoload.policies.plan.Plan, loads: Tensor, batch: SourceBatch) -> Row:
    """Of every layer of one batch."""
    copies = copies_of(plan, loads, batch)
    peak, total = copies.sum(-2).amax(-1), copies.sum((-2, -1))
    imports = plan.telemetry[:, 0] if plan.policy.borrows and plan.telemetry is not None else torch.zeros(1)
    return {
        "imbalance": (peak * loads.shape[-2] / total).tolist(),
        "over": (peak / plan.bound).tolist(),
        "local": (copies.diagonal(dim1=-2, dim2=-1).sum(-1) / total).tolist(),
        "imports": (imports / loads.shape[-2]).expand(len(loads)).tolist(),
    }


def imbalance(stream: Stream, most: int) -> list[Row]:
    """A row per policy, spare slots and prediction."""
    ahead_of, cells = forecasts(stream), {}
    spared, resident = ({n: place(stream, n, placer) for n in SPARE} for placer in ("trivial", "eplb"))

    def add(
        key: tuple[str, int, str], plan: isoload.policies.plan.Plan, loads: Tensor, batch: SourceBatch
    ) -> None:
        cells.setdefault(key, []).append(figures(plan, loads, batch))

    for index in stream.fold.replay[: most or None]:
        batch = stream.batch(index)
        loads = batch.loads(stream.trace.num_experts)
        ahead = {kind: forecast.of(batch, index, loads, 0) for kind, forecast in ahead_of.items()}
        for spare in SPARE:
            for text in RESIDENT:
                plan = isoload.plan(loads, resident[spare], None, text, step=index)
                add((f"eplb {text}", spare, "calibration"), plan, loads, batch)
            for text in IN_TIME:
                plan = isoload.plan(loads, spared[spare], None, policy_of(text))
                add((text.split(":")[0], spare, "true loads"), plan, loads, batch)
            pairs = [*product((*AHEAD, HELD), ahead), *(("lina", kind) for kind in LINA if kind in ahead)]
            for text, kind in pairs:
                policy, keep = policy_of(text.removesuffix(" held")), text == HELD
                filled = planning.fill(ahead[kind], spared[spare], None, policy)
                plan = isoload.plan(loads, spared[spare], None, policy, filled=filled, keep_local=keep)
                add((text, spare, kind), plan, loads, batch)
    return [summary(stream, key, found) for key, found in cells.items()]


def summary(stream: Stream, key: tuple[str, int, str], found: list[Row]) -> Row:
    every = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    imports = float(every["imports"].mean())
    return {
        **where(stream),
        "policy": key[0],
        "spare": key[1],
        "predict": key[2],
        "batches": len(found),
        "layers": len(found[0]["imbalance"]),
        "imbalance_mean": round(float(every["imbalance"].mean()), DIGITS),
        "imbalance_p99": round(float(np.percentile(every["imbalance"], 99)), DIGITS),
        "over_bound_max": round(float(every["over"].max()), DIGITS),
        "local_mean": round(float(every["local"].mean()), DIGITS),
        "imports_mean": round(imports, DIGITS),
        "import_mb": round(imports * stream.expert_bytes / 1e6, DIGITS),
    }


def where(stream: Stream) -> Row:
    return {"trace": stream.name, "ranks": stream.ranks, "deal": stream.deal, "tokens": stream.tokens}


def traffic(stream: Stream, most: int) -> list[Row]:
    """Rows and bytes of dispatch under fills of which 80 % of the choices are right."""
    forecast, rows = Forecast("0.8", stream.trace, stream.batches, stream.fold, SEED), []
    topology, sent = isoload.Topology(stream.ranks), {}
    chosen = stream.fold.replay[: min(most or TRAFFIC_BATCHES, TRAFFIC_BATCHES)]
    tokens = 0
    for index in chosen:
        batch = stream.batch(index)
        loads = batch.loads(stream.trace.num_experts)
        predicted, tokens = forecast.of(batch, index, loads, 0), tokens + batch.num_tokens
        for text, spare in (("none", 2), ("libra", 2), ("libra", 8), ("hedge", 2), ("hedge", 8)):
            placement = place(stream, spare, "trivial")
            filled = None if text == "none" else planning.fill(predicted, placement, None, text)
            plan = isoload.plan(loads, placement, None, text, filled=filled)
            slots = routed_slots(plan, loads, batch).numpy()
            counted = count_routed(slots, batch.sources(), topology, placement.slots_per_rank)
            sent.setdefault((text, spare), []).append(counted.rows[:, 1].mean())
    width, top_k = 2 * stream.hidden, batch.topk_ids.shape[-1]
    gathered = tokens / len(chosen) * (stream.ranks - 1) * (width + 8 * top_k) / 1e6
    for (policy, spare), left in sent.items():
        mean = float(np.mean(left))
        rows.append(
            {
                **where(stream),
                "policy": policy,
                "spare": spare,
                "rows_per_token": mean * len(chosen) / tokens,
                "all_to_all_mb": mean * width / 1e6,
                "all_gather_mb": gathered,
            }
        )
    return rows


def right_choices(stream: Stream, most: int) -> list[Row]:
    """Per expert and token, fitted on the calibration's tokens, tested on the others."""
    if not stream.per_token or stream.deal != "even":
        return []
    return right_about(stream.name, "all", *parts(stream))


def right_about(name: str, fitted: str, seen: isoload.traces.Trace, fresh: isoload.traces.Trace) -> list[Row]:
    made = {"linear": predict.fit(seen), "path": tabulate(seen)}
    return [
        {
            "trace": name,
            "fitted": fitted,
            "predictor": kind,
            "accuracy": float(np.mean(accuracy(one, fresh))),
        }
        for kind, one in made.items()
    ]


def other_tasks(folder: Path) -> list[Row]:
    """The tasks one by one: fitted on the first halves of all three, and of the two others."""
    paths = present(folder, *(f"dsv2lite_esft_{task}" for task in TASKS))
    if len(paths) < len(TASKS):
        return []
    read = {task: read_trace(path) for task, path in zip(TASKS, paths.values(), strict=True)}
    ids = {task: trace.topk_ids for task, trace in read.items()}
    bare = isoload.traces.Trace("tokens", read["law"].num_experts, topk_ids=ids["law"])
    rows = []
    for task in TASKS:
        fresh = replace(bare, topk_ids=ids[task][len(ids[task]) // 2 :])
        for fitted, names in (("all", TASKS), ("other tasks", [t for t in TASKS if t != task])):
            seen = np.concatenate([ids[t][: len(ids[t]) // 2] for t in names])
            rows += right_about(f"DeepSeek-V2-Lite, {task}", fitted, replace(bare, topk_ids=seen), fresh)
    return rows


Bench = Callable[[Path, int], list[Row]]


def over(bench: Callable[[Stream, int], list[Row]], *, made: bool = False) -> Bench:
    """A bench of one stream over all of them."""

    def run(folder: Path, most: int) -> list[Row]:
        every = chain(streams(folder), workloads() if made else ())
        return [row for stream in every for row in bench(stream, most)]

    return run


BENCHES: dict[str, Bench] = {
    "imbalance": over(imbalance, made=True),
    "traffic": over(traffic),
    "accuracy": over(right_choices),
    "other tasks": lambda folder, most: other_tasks(folder),
}


def show(rows: list[Row]) -> None:
    """Per stream the mean imbalance by spare slots; the other tables as they are."""
    balance = [row for row in rows if row["table"] == "imbalance"]
    columns = {"policy": "{any[policy]}", "prediction": "{any[predict]}"}
    figures = "{NAME[imbalance_mean]:.4f}, {NAME[imbalance_p99]:.3f} ({NAME[local_mean]:.2f}, {NAME[imports_mean]:.1f})"
    columns |= {f"N={n}": figures.replace("NAME", f"n{n}") for n in SPARE}
    for key in dict.fromkeys((r["trace"], r["ranks"], r["deal"]) for r in balance):
        mine = [r | {"n": f"n{r['spare']}"} for r in balance if (r["trace"], r["ranks"], r["deal"]) == key]
        cells = [
            cell | {"any": next(iter(cell.values()))}
            for cell in by(mine, "policy", "predict", last="n").values()
        ]
        title = f"{key[0]}, {key[1]} ranks, {key[2]}: mean imbalance, 99 % (local, imports per rank)"
        table.show(title, columns, cells)
    for name in [name for name in BENCHES if name != "imbalance"]:
        if found := [row for row in rows if row["table"] == name]:
            table.show_rows(name, found, "table")


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--only", choices=BENCHES, help="one table; the others keep their rows")
    parser.add_argument("--max-batches", type=int, default=0, help="of every stream; 0 = all")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name, bench in BENCHES.items():
        if arguments.only in (None, name):
            found = bench(arguments.traces, arguments.max_batches)
            rows += [{"table": name, **row} for row in found]
    rows_or_end(rows, FILES)
    show(rows)
    print(machine())
    if not arguments.no_write:
        kept = [row for row in read_results("bench_libra") if arguments.only not in (None, row.get("table"))]
        print(f"written: {write_results('bench_libra', kept + rows)}")


if __name__ == "__main__":
    main()
