"""The routing of bench_dispatch: what placements may be made from, and the batches that are measured after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload.analysis.batches import make_batches
from isoload.traces import Ints
from lib.dispatch_setting import Setting
from workloads import make_workload

SHIPPED = Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz"
EXPONENT, DRIFT = 0.8, 0.5  # as in bench_plan: near recorded DeepSeek-V3 on 8 and 16 ranks


@dataclass(frozen=True)
class Routing:
    """seen: a Trace, or counts [batches, 1, E], before the batches; batches: [batch][R] choices [T, K] int64."""

    name: str
    seen: isoload.traces.Trace | Ints
    batches: list[list[Tensor]]


Source = Callable[[], Routing]


def sources(setting: Setting, num_batches: int, traces: Sequence[isoload.traces.Trace]) -> dict[str, Source]:
    """By name, where a setting's skewed routing can come from: recorded where a trace fits the shape, and made."""
    shape = setting.shape
    fitting = [t for t in traces if (t.num_experts, t.top_k) == (shape.experts, shape.top_k)]
    found = {trace.name: partial(recorded, setting, num_batches, trace) for trace in fitting}
    return {**found, "made": partial(made, setting, num_batches)}


def made(setting: Setting, num_batches: int) -> Routing:
    """Popularity by Zipf, which a placement may see, and drifts of it, a new one in every batch."""
    seen = torch.cat(_workload(setting, "zipf", exponent=EXPONENT, clip=True).topk_ids(0))
    drifts = _workload(setting, "drift", exponent=EXPONENT, drift=DRIFT, clip=True)
    return Routing("made", _trace("made", seen, setting), [drifts.topk_ids(i) for i in range(num_batches)])


def even(setting: Setting, num_batches: int) -> Routing:
    """Every expert has the same load, to one copy: the limit of what balancing can reach."""
    workload = _workload(setting, "balanced")
    batches = [workload.topk_ids(i) for i in range(num_batches)]
    return Routing("even", _trace("even", torch.cat(batches[0]), setting), batches)


def recorded(setting: Setting, num_batches: int, trace: isoload.traces.Trace) -> Routing:
    """The layer of median imbalance; placements see the first half of its batches, the rest are measured.

    Raises:
        ValueError: the trace is too short for two batches.
    """
    layer, wanted = median_layer(trace.batch_counts(), setting.ranks), setting.ranks * setting.tokens
    batches = make_batches(trace.select_layers([layer]), wanted)
    whole = np.flatnonzero(np.array(batches.num_tokens) == wanted).tolist()
    if len(whole) < 2:
        raise ValueError(
            f"trace {trace.name} must have at least 2 batches of {wanted} tokens, got {len(whole)}"
        )
    first, rest = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    chosen = rest[:: -(-len(rest) // num_batches)]
    cut = [batches.source_batch(i, setting.ranks, "contiguous") for i in chosen]
    ids = [[batch.on_rank(0, rank).long() for rank in range(setting.ranks)] for batch in cut]
    seen: isoload.traces.Trace | Ints = batches.counts[first]
    if batches.trace.topk_ids is not None:  # placer grace wants to know which experts are chosen together
        before = batches.trace.topk_ids[: batches.tokens(first[-1]).stop, 0]
        seen = _trace(trace.name, torch.from_numpy(before), setting)
    return Routing(f"{trace.name}, layer {trace.layer_ids[layer]}", seen, ids)


def read_folder(folder: Path) -> list[isoload.traces.Trace]:
    """The traces of a folder; what cannot be read, or has fewer than two batches, is named on stderr."""
    traces = []
    for path in sorted(folder.glob("*.npz")):
        try:
            trace = isoload.read_trace(path)
        except ValueError as error:
            print(f"{path.name} not used: {error}", file=sys.stderr)
            continue
        if not trace.has_tokens and trace.num_batches < 2:
            print(f"{path.name} not used: one batch of counts leaves nothing to measure", file=sys.stderr)
            continue
        traces.append(trace)
    return traces


def median_layer(counts: Ints, ranks: int) -> int:
    """Position of the layer whose ranks, experts in order, are less equal than those of half the layers."""
    total = counts.sum(0)  # [L, E]
    size = -(-total.shape[1] // ranks)
    loads = np.add.reduceat(total, range(0, total.shape[1], size), axis=1)
    return int(np.argsort(loads.max(1) / total.sum(1).clip(1), kind="stable")[len(total) // 2])


def _workload(setting: Setting, name: str, **options: Any) -> Any:
    return make_workload(
        name,
        num_ranks=setting.ranks,
        num_experts=setting.shape.experts,
        top_k=setting.shape.top_k,
        tokens_per_rank=setting.tokens,
        **options,
    )


def _trace(name: str, ids: Tensor, setting: Setting) -> isoload.traces.Trace:
    """A trace of one layer, from choices [T, K]."""
    return isoload.traces.Trace(
        name, setting.shape.experts, topk_ids=ids.unsqueeze(1).numpy().astype(np.int32)
    )
