"""A trace for the small model of the harness, and what an engine that routes by it must have done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from torch import Tensor

from isoload.analysis.rank_loads import Recorded, read_recorded
from isoload.analysis.server import phases
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.engines.recorded_skew import RecordedRouting, rows_from_counts
from isoload.traces.npz import write_trace
from isoload.traces.record import Trace

IN_VLLM = {
    "enable_eplb": True, "load_format": "dummy",
    "eplb_config": {
        "num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "use_async": False,
        "communicator": "torch_gloo",
    },
}  # fmt: skip
IN_SGLANG = {
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True, "load_format": "dummy",
    "eplb_rebalance_num_iterations": 7, "expert_distribution_recorder_buffer_size": 7,
    "expert_distribution_recorder_mode": "stat",
}  # fmt: skip
EXPERTS, TOP_K, LAYERS, RANKS, SLOTS = 16, 4, 3, 2, 10


def skewed_trace(path: Path, experts: int = EXPERTS, layers: int = LAYERS) -> Path:
    draw = np.random.default_rng(5)
    skew = draw.dirichlet(np.full(experts, 0.5), layers) * 0.5 + 0.5 / experts
    ids = np.stack(
        [[draw.choice(experts, TOP_K, replace=False, p=p) for p in skew] for _ in range(1500)], dtype=np.int32
    )
    write_trace(Trace("skewed", experts, topk_ids=ids, layer_ids=tuple(range(layers))), path)
    return path


def check_walk(run: EngineRun, path: Path) -> None:
    """Each layer's tokens are consecutive rows of its table; the recorded slots hold these experts."""
    for layer in range(LAYERS):
        routing = RecordedRouting(f"{path}:seed=7")
        routing.prepare(layer, EXPERTS, TOP_K, torch.device("cpu"))
        table = routing.tables[layer].long()
        rows = {tuple(row): i for i, row in enumerate(table.tolist())}  # of equal rows the last
        batches = [batch for batch in run.batches[0] if batch.layer == layer and len(batch.slots)]
        chosen = torch.cat([experts_of(batch.slots, batch.table, batch.ids) for batch in batches])
        starts = [i for i in range(len(table)) if torch.equal(taken(table, i, len(chosen)), chosen)]
        assert len(batches) > 20 and len(starts) == 1 and tuple(chosen[0].tolist()) in rows, layer


def experts_of(slots: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """[T, K] experts of slots, if the run has tables, else the ids that the hook outside recorded."""
    return table[slots] if len(table) else ids


def taken(table: Tensor, start: int, number: int) -> Tensor:
    return table[(torch.arange(number) + start) % len(table)]


def check_report(folder: Path, path: Path) -> None:
    """Shadow's figures are those of a replay of tokens with the counts of each pass, on its placement."""
    recorded: Recorded = read_recorded(folder)
    (decode,) = [phase for phase in phases(recorded) if phase.name == "decode"]
    assert recorded.trace.counts is not None
    planned = []
    for batch in decode.batches:
        counts, placement = recorded.trace.counts[batch], recorded.placement(batch)
        tokens = int(counts[0].sum()) // TOP_K
        ids = np.stack([rows_from_counts(layer, TOP_K, tokens, 0) for layer in counts], 1)
        trace = Trace("t", EXPERTS, topk_ids=ids, identity=placement.identity)
        how = ReplaySettings(RANKS, 0, SLOTS, policies=("exact",), batch_tokens=tokens)
        (exact,) = replay(trace, how, placement=placement).policies
        planned.append(exact.imbalance_mean)
    assert decode.planned.mean() == pytest.approx(sum(planned) / len(planned))
