"""Real vLLM engines over two CPU processes that start from a placement file (ISOLOAD_PLACEMENT): a model with a dense
first layer, synchronous EPLB and tensor parallel without isoload's own choices, asynchronous EPLB and data parallel with
them. Hugging Face's model of the same checkpoint is the oracle."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoint import PROMPTS, make_qwen3_moe
from engine_runs import Batch, EngineRun, refused_vllm, run_vllm, run_vllm_pair
from transformers import Qwen3MoeForCausalLM
from vllm_cpu import map_and_record

import isoload
from isoload.integrations.engine_tables import replica_lists
from isoload.records.placement import Placement
from isoload.trace import Identity, Trace

CALM, TOKENS = 200, 240  # passes before the first rebalance, tokens of a request
EPLB = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 8, "communicator": "torch_gloo"}
OPTIONS = {"enable_eplb": True, "max_model_len": 512, "max_tokens": TOKENS}
RANKS, SLOTS, EXPERTS, K = 2, 10, 16, 4
MOE_LAYERS = (1, 2, 3)
DEFAULT = [*range(EXPERTS), 0, 1, 2, 3]
"""vLLM's own map of every layer."""


class Oracle(NamedTuple):
    """A checkpoint, Hugging Face's greedy tokens, and a placement of what its router chose for them."""

    folder: Path
    tokens: list[list[int]]
    placement: Placement
    file: Path


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("tiny-moe")
    tokens = make_qwen3_moe(folder, head_dim=32, num_dense=1, tokens=TOKENS)
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    counts = torch.zeros(len(MOE_LAYERS), EXPERTS, dtype=torch.int64)
    for prompt, made in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + made]), output_router_logits=True).router_logits
        for row, of in enumerate(logits):
            counts[row] += torch.bincount(of.topk(K, dim=-1).indices.flatten(), minlength=EXPERTS)
    identity = Identity("model", MOE_LAYERS, folder.name)
    trace = Trace("tiny", EXPERTS, counts=counts.numpy()[None], layer_ids=MOE_LAYERS, identity=identity)
    placement = isoload.place(trace, isoload.Topology(RANKS), SLOTS, "scenario")
    file = folder.parent / f"{folder.name}.json"
    isoload.write_placement(placement, file)
    rows = placement.slot_to_expert.tolist()
    assert DEFAULT not in rows and len({tuple(row) for row in rows}) == len(rows), "each layer has a map of its own"
    return Oracle(folder, tokens, placement, file)


@pytest.fixture(scope="module")
def started(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Tensor parallel, synchronous; vLLM itself chooses replicas and rebalances."""
    variables = {"ISOLOAD_PLACEMENT": str(oracle.file), "ENGINE_CALM": str(CALM)}
    options = OPTIONS | {"eplb_config": EPLB | {"use_async": False}}
    return run_vllm(oracle.folder, tmp_path_factory.mktemp("runs") / "start", variables, **options)


@pytest.fixture(scope="module")
def pair(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> list[EngineRun]:
    """Data parallel, asynchronous; isoload chooses replicas and rebalances, every slot's weights are compared."""
    variables = {
        "ISOLOAD_PLACEMENT": str(oracle.file), "ENGINE_CALM": str(CALM), "ISOLOAD_VLLM": "1", "ISOLOAD_STRICT": "1",
        "ISOLOAD_CHECK_WEIGHTS": "1",
    }  # fmt: skip
    options = OPTIONS | {"eplb_config": EPLB | {"use_async": True}}
    return run_vllm_pair(oracle.folder, tmp_path_factory.mktemp("runs") / "pair", variables, **options)


def passes(batches: list[Batch]) -> list[list[Batch]]:
    """Batches of all layers, pass by pass."""
    return [batches[i : i + len(MOE_LAYERS)] for i in range(0, len(batches), len(MOE_LAYERS))]


def check_maps(batches: list[Batch], placement: Placement) -> None:
    """Every layer lies as in the file from the first pass until the first rebalance, afterwards otherwise."""
    for number, layers in enumerate(passes(batches)):
        if number < CALM:
            for row, batch in enumerate(layers):
                assert batch.layer == row and batch.table.tolist() == placement.slot_to_expert[row].tolist()


def rebalances(batches: list[Batch]) -> int:
    """How often some layer got another map."""
    layers = zip(*passes(batches), strict=True)
    return min(sum(not torch.equal(a.table, b.table) for a, b in pairwise(layer)) for layer in layers)


def test_every_layer_starts_as_the_file_says(oracle: Oracle, started: EngineRun) -> None:
    for batches in started.batches:
        check_maps(batches, oracle.placement)
    (line,) = started.lines("starts from ISOLOAD_PLACEMENT=")
    changed = int((oracle.placement.slot_to_expert != torch.tensor(DEFAULT)).sum())
    assert f"3 layers, {changed} of 60 slots differ from vLLM's default map" in line


def test_tokens_are_hugging_faces(oracle: Oracle, started: EngineRun) -> None:
    assert started.tokens == oracle.tokens
    for batch in (batch for batches in started.batches for batch in batches):
        assert torch.equal(batch.table[batch.slots], batch.ids)


def imbalance(batches: list[Batch], table: list[int] | None = None) -> float:
    """Mean of max/mean rank load over the passes before the first rebalance; table: where vLLM's rule would have sent
    the same copies with this map."""
    found = []
    for batch in (batch for layers in passes(batches)[:CALM] for batch in layers):
        slots = batch.slots
        if table is not None:
            lists = replica_lists(Placement(torch.tensor([table]), isoload.Topology(RANKS), EXPERTS))
            maps = lists.logical_to_physical[0], lists.num_replicas[0]
            slots = map_and_record(batch.ids, torch.zeros(RANKS * SLOTS), *maps, torch.tensor(False))
        loads = torch.bincount(slots.flatten() // SLOTS, minlength=RANKS).double()
        found.append(float(loads.max() / loads.mean()))
    return sum(found) / len(found)


def test_the_first_passes_are_leveller_than_vllms_start(started: EngineRun) -> None:
    """vLLM's own choice of replicas both times."""
    ours, theirs = imbalance(started.batches[0]), imbalance(started.batches[0], DEFAULT)
    print(f"imbalance of {CALM} passes: {theirs:.3f} by vLLM's default start, {ours:.3f} by the file")
    assert ours < theirs


def test_rebalances_follow(started: EngineRun, pair: list[EngineRun]) -> None:
    """At least three, each of which starts from where the file has the experts."""
    assert len(started.lines("Rearranged experts")) >= 3
    assert len(pair[0].lines("Rearranging experts (async mode)")) >= 3
    assert rebalances(started.batches[0]) and rebalances(pair[0].batches[0])


def test_asynchronous_and_data_parallel(oracle: Oracle, pair: list[EngineRun]) -> None:
    for rank, run in enumerate(pair):
        assert run.tokens == [tokens[: TOKENS - 8 * rank] for tokens in oracle.tokens[rank::2]]
        check_maps(run.batches[rank], oracle.placement)
    checked = pair[0].lines("slots have their experts' weights ")
    assert "at load" in checked[0] and len(checked) > 3
