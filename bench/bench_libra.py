"""Imbalance of fills made ahead, by how well the next batch is predicted: libra, hedge, and what they are compared to.

Fairness ledger
- Experts lie in their order, E / R per rank, without replicas; N spare slots per rank. Nothing is placed by history.
- Streams: DeepSeek-V2-Lite, three ESFT tasks, whose second halves are shuffled token by token (1024 per batch);
  gpt-oss-20b decode without the first ten steps (512); GLM-5.2, tokens drawn from the counts of text domains, which
  change from batch to batch (4096), every fifth layer. First halves calibrate, nothing of them is counted.
- Predictions: perfect; a number = that part of the true choices, the others drawn from the calibration's counts; last
  = the batch before; linear = fitted on the calibration's tokens (not where tokens are drawn). All policies get the
  same one. llep plans from the true loads, at min_chunk=1, threshold=0, tolerance=0: what a fill in time could reach.
- imbalance = max / mean rank load, over (layer, batch). local = part of the copies computed on their source rank.
  imports per rank are counted, weights do not travel here; no figure is a time.
- even: tokens dealt one by one; sequence: whole sequences to a rank (gpt-oss: the steps of a request).

Usage: python bench/bench_libra.py --traces FOLDER   (npz files; what is not there is left out and said)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import isoload
from harness import machine, write_results
from isoload import planning, predict
from isoload.policies import parse_policy
from isoload.replay.batches import SourceBatch, make_batches
from isoload.replay.calibration import Fold
from isoload.replay.prediction import Forecast
from isoload.trace import Trace, read_trace

TASKS = ("intent", "law", "summary")
SPARE = (1, 2, 4, 8)
PREDICTIONS = ("perfect", "0.9", "0.8", "0.45", "0.12", "last", "linear")
AHEAD = ("libra:printed=True", "libra", "libra:split_by=exact", "hedge")
IN_TIME = ("none", "llep:min_chunk=1:threshold=0:tolerance=0")
SEED = 0


def joined(traces: list[Trace], tokens: int) -> tuple[Trace, Fold]:
    """First halves one after another, then the second halves shuffled; whole batches alone."""
    halves = [len(t.topk_ids) // 2 for t in traces if t.topk_ids is not None]
    first = [t.topk_ids[:n] for t, n in zip(traces, halves, strict=True) if t.topk_ids is not None]
    second = [t.topk_ids[n:] for t, n in zip(traces, halves, strict=True) if t.topk_ids is not None]
    calibrate, rest = np.concatenate(first), np.concatenate(second)
    seen = len(calibrate) // tokens * tokens
    rest = rest[np.random.default_rng(SEED).permutation(len(rest))][: len(rest) // tokens * tokens]
    ids = np.concatenate([calibrate[:seen], rest])
    trace = Trace("DeepSeek-V2-Lite", traces[0].num_experts, topk_ids=ids)
    count, known = len(ids) // tokens, seen // tokens
    return trace, Fold(tuple(range(known)), tuple(range(known, count)))


def halves(trace: Trace, tokens: int) -> tuple[Trace, Fold]:
    count = len(make_batches(trace, tokens).counts)
    return trace, Fold(tuple(range(count // 2)), tuple(range(count // 2, count)))


def decode(trace: Trace, tokens: int, skip: int = 640, requests: int = 64) -> tuple[Trace, Fold]:
    """Without the steps of the template; a row's request is its place in the step."""
    assert trace.topk_ids is not None
    ids = trace.topk_ids[skip:]
    ids = ids[: len(ids) // tokens * tokens]
    found = Trace("gpt-oss-20b", trace.num_experts, topk_ids=ids, seq_id=np.arange(len(ids)) % requests)
    return halves(found, tokens)


def streams(
    folder: Path, console: Console
) -> Iterator[tuple[Trace, Fold, int, tuple[int, ...], tuple[str, ...]]]:
    """Trace, batches, tokens per batch, numbers of ranks, ways to deal."""

    def found(*stems: str) -> list[Trace]:
        paths = [folder / f"{stem}.npz" for stem in stems]
        for path in paths:
            if not path.exists():
                console.print(f"{path.name} is not there: left out")
        return [read_trace(path) for path in paths if path.exists()]

    if tasks := found(*(f"dsv2lite_esft_{task}" for task in TASKS)):
        yield *joined(tasks, 1024), 1024, (8,), ("even",)
    for trace in found("gptoss20b_decode_mmlu"):
        yield *decode(trace, 512), 512, (8,), ("even", "sequence")
    for trace in found("glm52_domains_a"):
        picked = trace.select_layers(range(0, trace.num_layers, 5))
        yield *halves(replace(picked, name="GLM-5.2"), 4096), 4096, (8, 32), ("even",)


def loads_of(batch: SourceBatch, num_experts: int) -> Tensor:
    """[L, R, E] int32."""
    layers, ranks = range(len(batch.topk_ids)), range(batch.num_ranks)
    rows = [[isoload.count(batch.on_rank(i, r), num_experts) for r in ranks] for i in layers]
    return torch.stack([torch.stack(row) for row in rows])


def place(trace: Trace, ranks: int, spare: int) -> isoload.Placement:
    counts = np.ones((trace.num_layers, trace.num_experts), np.int64)
    size = -(-trace.num_experts // ranks) + spare
    return isoload.place(counts, isoload.Topology(ranks), size, "trivial", spare_slots=spare)


def figures(plan: isoload.Plan, loads: Tensor) -> dict[str, Any]:
    """Of every layer of one batch."""
    copies = plan.policy.copies(loads, plan)
    mean = loads.sum((-2, -1)) / loads.shape[-2]
    assert plan.peak is not None
    imports = (
        torch.zeros(len(loads)) if plan.telemetry is None or not plan.policy.borrows else plan.telemetry[:, 0]
    )
    return {
        "imbalance": (plan.peak / mean).tolist(),
        "over": (plan.peak / plan.bound).tolist(),
        "local": (copies.diagonal(dim1=-2, dim2=-1).sum(-1) / copies.sum((-2, -1))).tolist(),
        "imports": (imports / loads.shape[-2]).tolist(),
    }


def run(trace: Trace, fold: Fold, tokens: int, ranks: int, deal: str, most: int) -> list[dict[str, Any]]:
    """A row per policy, spare slots and prediction."""
    batches = make_batches(trace, tokens, SEED)
    kinds = [kind for kind in PREDICTIONS if kind != "linear" or not batches.drawn]
    forecasts = {kind: Forecast(kind, trace, batches, fold, SEED) for kind in kinds}
    placements = {spare: place(trace, ranks, spare) for spare in SPARE}
    cells: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for index in fold.replay[: most or None]:
        batch = batches.source_batch(index, ranks, "round-robin" if deal == "even" else "contiguous")
        loads = loads_of(batch, trace.num_experts)
        ahead = {kind: forecast.of(batch, index, loads, 0) for kind, forecast in forecasts.items()}
        for spare, placement in placements.items():
            for text in IN_TIME:
                name, options = parse_policy(text)
                plan = isoload.plan(loads, placement, None, name, **options)
                cells.setdefault((text.split(":")[0], spare, "true loads"), []).append(figures(plan, loads))
            for text in AHEAD:
                name, options = parse_policy(text)
                for kind, predicted in ahead.items():
                    filled = planning.fill(predicted, placement, None, name, **options)
                    plan = isoload.plan(loads, placement, None, name, filled=filled, **options)
                    cells.setdefault((text, spare, kind), []).append(figures(plan, loads))
    where = {"trace": trace.name, "ranks": ranks, "deal": deal, "tokens": tokens}
    return [{**where, **summary(key, found)} for key, found in cells.items()]


def summary(key: tuple[str, int, str], found: list[dict[str, Any]]) -> dict[str, Any]:
    every = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    return {
        "policy": key[0],
        "spare": key[1],
        "predict": key[2],
        "batches": len(found),
        "layers": len(found[0]["imbalance"]),
        "imbalance_mean": float(every["imbalance"].mean()),
        "imbalance_p99": float(np.percentile(every["imbalance"], 99)),
        "over_bound_max": float(every["over"].max()),
        "local_mean": float(every["local"].mean()),
        "imports_mean": float(every["imports"].mean()),
    }


def accuracies(trace: Trace, fold: Fold, tokens: int) -> list[dict[str, Any]]:
    """Per expert and token, fitted on the calibration's tokens, tested on the others."""
    if trace.topk_ids is None:
        return []
    cut = len(fold.calibrate) * tokens
    seen, fresh = (
        replace(trace, topk_ids=x, seq_id=None) for x in (trace.topk_ids[:cut], trace.topk_ids[cut:])
    )
    made = {"linear": predict.fit(seen), "path table": predict.tabulate(seen)}
    return [
        {"trace": trace.name, "predictor": name, "accuracy": float(np.mean(predict.accuracy(one, fresh)))}
        for name, one in made.items()
    ]


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Per stream the mean imbalance by spare slots."""
    keys = dict.fromkeys((r["trace"], r["ranks"], r["deal"]) for r in rows)
    for key in keys:
        mine = [r for r in rows if (r["trace"], r["ranks"], r["deal"]) == key]
        table = Table(
            title=f"{key[0]}, {key[1]} ranks, {key[2]}: mean imbalance (local share, imports per rank)"
        )
        table.add_column("policy")
        table.add_column("prediction")
        for spare in SPARE:
            table.add_column(f"N={spare}", justify="right")
        for policy, kind in dict.fromkeys((r["policy"], r["predict"]) for r in mine):
            row = {r["spare"]: r for r in mine if (r["policy"], r["predict"]) == (policy, kind)}
            cells = (
                f"{row[n]['imbalance_mean']:.4f} ({row[n]['local_mean']:.2f}, {row[n]['imports_mean']:.1f})"
                for n in SPARE
            )
            table.add_row(policy, kind, *cells)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of npz traces")
    parser.add_argument("--max-batches", type=int, default=0, help="of every stream; 0 = all")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    console, rows, right = Console(highlight=False, width=200), [], []
    for trace, fold, tokens, ranks, deals in streams(arguments.traces, console):
        right += accuracies(trace, fold, tokens)
        for number in ranks:
            for deal in deals:
                rows += run(trace, fold, tokens, number, deal, arguments.max_batches)
    if not rows:
        raise SystemExit(f"{arguments.traces} holds none of the streams")
    show(rows, console)
    for row in right:
        console.print(
            f"{row['trace']}: {row['predictor']} is right about {row['accuracy']:.3f} of the choices"
        )
    console.print(machine())
    if not arguments.no_write:
        console.print(f"written: {write_results('bench_libra', rows + right)}")


if __name__ == "__main__":
    main()
