"""The weight check over two ranks: experts of a made-up model move, and something goes wrong on the way."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from isoload.engines import layers as engine_layers
from isoload.engines.settings import Settings
from isoload.engines.tables import replica_lists
from isoload.engines.vllm import MODELS, dispatch
from isoload.online.weight_check import NAMED, named
from isoload.weights.checksums import WrongSlot
from support.processes import rank_outcomes, run_ranks
from support.told_metrics import Told

RANKS, EXPERTS, LAYERS, SIZE, HIDDEN = 2, 6, 3, 4, 8
Weights = list[list[Tensor]]


class State(SimpleNamespace):
    """As vLLM's EplbModelState."""


def table(seed: int) -> Tensor:
    """[L, P]"""
    loads = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).pow(4)
    return isoload.place(loads, isoload.Topology(RANKS), SIZE).slot_to_expert.long()


def expert(layer: int, number: int) -> tuple[Tensor, Tensor]:
    """Its fp8 weights, as bytes, and its scales."""
    generator = torch.Generator().manual_seed(100 * layer + number)
    drawn = torch.randint(0, 256, (HIDDEN, HIDDEN), generator=generator, dtype=torch.uint8)
    return drawn, torch.rand(HIDDEN, generator=generator)


def held(rank: int, slots: Tensor) -> Weights:
    """[S, ...] weights and [S, ...] scales of each layer on a rank, by a map [L, P]."""
    rows = slots.view(LAYERS, RANKS, SIZE)[:, rank]
    return [
        [torch.stack(parts) for parts in zip(*(expert(i, int(e)) for e in row), strict=True)]
        for i, row in enumerate(rows)
    ]


def a_byte(weights: Weights) -> None:
    weights[1][0][2, 3, 4] ^= 1


def a_replicas_byte(weights: Weights) -> None:
    weights[1][0][0, 3, 4] ^= 128


def two_rows(weights: Weights) -> None:
    weights[1][0][2, [0, 1]] = weights[1][0][2, [1, 0]]


def two_experts(weights: Weights) -> None:
    for tensor in weights[1]:
        tensor[[2, 3]] = tensor[[3, 2]]


def scales(weights: Weights) -> None:
    weights[1][1][[2, 3]] = weights[1][1][[3, 2]]


def nothing(weights: Weights) -> None: ...


def model(rank: int, **variables: str) -> Any:
    """A model of a vLLM process whose hooks are in place."""
    module = ModuleType("vllm.distributed.parallel_state")
    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank, device_group=dist.group.WORLD)
    module.get_ep_group, module.get_node_count = lambda: group, lambda: 1  # type: ignore[attr-defined]
    sys.modules.update(dict.fromkeys(("vllm", "vllm.distributed", "vllm.distributed.parallel_state"), module))
    lists = replica_lists(isoload.Placement(table(0).int(), isoload.Topology(RANKS), EXPERTS))
    runner = SimpleNamespace(
        do_naive_dispatch_combine=False,
        is_monolithic=False,
        moe_config=SimpleNamespace(is_sequence_parallel=False),
    )
    MODELS.start(Settings.read({"ISOLOAD_CHECK_WEIGHTS": "1", **variables}))
    return State(
        physical_to_logical_map=table(0), logical_to_physical_map=lists.logical_to_physical, rebalanced=False,
        model=SimpleNamespace(
            num_logical_experts=EXPERTS, moe_layers=[runner] * LAYERS, expert_weights=held(rank, table(0))
        ), model_name="model",
    )  # fmt: skip


PARALLEL = SimpleNamespace(
    data_parallel_size=1, tensor_parallel_size=RANKS, prefill_context_parallel_size=1, enable_elastic_ep=False,
    eplb_config=SimpleNamespace(num_redundant_experts=RANKS * SIZE - EXPERTS),
    use_ubatching=False,
)  # fmt: skip


def slots_of(state: Any, layer: int) -> Tensor:
    """Of a batch that chooses every expert four times; -7: vLLM's own choice."""
    ids = torch.arange(EXPERTS, dtype=torch.int32).repeat(4).view(-1, 1)
    loads, given = torch.zeros(RANKS * SIZE, dtype=torch.int32), (torch.zeros(0), torch.tensor(True))
    maps = state.logical_to_physical_map[layer]
    return dispatch.map_and_record(lambda rows, *_: torch.full_like(rows, -7), ids, loads, maps, *given)


def serve(
    rank: int, harm: Callable[[Weights], None], layer: int | None = None, at: str = "move", strict: str = "0"
) -> dict[str, Any]:
    """A model is loaded and its experts move, all layers' or one's; harm befalls the second rank's weights."""
    lines, told = listen(), Told()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = "."
    engine_layers.Metrics = lambda *_, **__: told  # type: ignore[assignment,misc]
    state, ended = model(rank, ISOLOAD_STRICT=strict, ISOLOAD_REPORT_SECONDS="3600"), ""
    moved = (
        table(0).index_copy(0, torch.tensor([layer]), table(1)[[layer]]) if layer is not None else table(1)
    )

    def happen(when: str) -> None:
        if at == when and rank == 1:
            harm(state.model.expert_weights)

    def move(*_: Any) -> None:
        for theirs, wanted in zip(state.model.expert_weights, held(rank, moved), strict=True):
            for tensor, value in zip(theirs, wanted, strict=True):
                tensor.copy_(value)
        happen("move")

    happen("load")
    holder = SimpleNamespace(model_states={}, parallel_config=PARALLEL)
    try:
        dispatch.add_model(lambda holder: holder.model_states.update(model=state), holder)
        given = (moved,) if layer is None else (moved[layer], layer)
        dispatch.on_layer_committed(move, state, *given)
    except SystemExit as error:
        ended = str(error)
    chosen = torch.stack([slots_of(state, i) for i in range(LAYERS)]).squeeze(2)
    return {"lines": lines, "ended": ended, "chosen": chosen, "told": told.values}


def listen() -> list[tuple[str, str]]:
    """(level, text) of what isoload says from now on, but that it is attached."""
    lines: list[tuple[str, str]] = []
    handler, log = logging.Handler(), logging.getLogger("isoload")
    handler.emit = lambda of: lines.append((of.levelname, of.getMessage()))  # type: ignore[method-assign]
    handler.addFilter(lambda of: "attached" not in of.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lines


def arrived(rank: int, before: Tensor, after: Tensor) -> int:
    """Experts over all layers that a rank holds in after [L, P] and did not in before."""
    held = [[set(row.tolist()) for row in of.view(LAYERS, RANKS, SIZE)[:, rank]] for of in (before, after)]
    return sum(len(new - old) for old, new in zip(*held, strict=True))


IDS = torch.arange(EXPERTS).repeat(4)
DETACHED = ". vLLM chooses replicas from now on; graphs that were captured keep isoload's choice"
UNKNOWN = "no known expert"


def said(when: str, *slots: tuple[int, str]) -> str:
    """What is said of slots of layer 1 on the second rank."""
    of = table(0 if when == "at load" else 1)[1]
    wrong = [f"layer 1, rank 1, slot {p} should hold expert {of[p]} and holds {what}" for p, what in slots]
    return f"isoload vLLM: weights are not those of their experts {when}: {'; '.join(wrong)}"


@pytest.mark.parametrize("layer", [None, 1])
def test_experts_that_arrive_whole(layer: int | None) -> None:
    """All layers at once or one, which alone is read."""
    moved = table(1) if layer is None else table(0).index_copy(0, torch.tensor([1]), table(1)[[1]])
    outcome = run_ranks(serve, RANKS, nothing, layer)
    for rank, found in enumerate(outcome):
        numbers = [LAYERS * RANKS * SIZE, (LAYERS if layer is None else 1) * RANKS * SIZE]
        lines = [
            ("INFO", f"isoload vLLM: {numbers[0]} slots have their experts' weights at load"),
            ("INFO", f"isoload vLLM: {numbers[1]} slots have their experts' weights after a rebalance"),
        ]
        assert found["lines"] == (lines if rank == 0 else []) and not found["ended"]
        came = arrived(rank, table(0), moved)
        assert found["told"]["wrong_slots"] == 0 and found["told"]["experts_moved_total"] == came > 0
        assert found["told"]["bytes_moved_total"] == came * sum(of.nbytes for of in expert(0, 0))
        assert torch.equal(moved.gather(1, found["chosen"].long()), IDS.expand(LAYERS, -1))


HARM = {
    "a byte": (a_byte, [(6, UNKNOWN)]),
    "two rows": (two_rows, [(6, UNKNOWN)]),
    "scales": (scales, [(6, UNKNOWN), (7, UNKNOWN)]),
    "two experts": (two_experts, [(6, f"expert {table(1)[1, 7]}"), (7, f"expert {table(1)[1, 6]}")]),
}


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("name", HARM)
def test_what_did_not_arrive_is_named_by_all_ranks_and_isoload_detaches(name: str, layer: int | None) -> None:
    harm, wrong = HARM[name]
    for found in run_ranks(serve, RANKS, harm, layer):
        assert found["lines"][-1] == ("ERROR", said("after a rebalance", *wrong) + DETACHED)
        assert found["told"]["wrong_slots"] == len(wrong) and not found["ended"]
        assert found["told"]["attached"] == 0
        assert (found["chosen"] == -7).all(), "vLLM's own"


def test_replicas_must_agree_when_the_model_is_loaded() -> None:
    """The lowest slot of an expert is believed. Nothing is compared once isoload is detached."""
    assert int(table(0)[1, 4]) in table(0)[1, :4].tolist(), "a replica"
    for found in run_ranks(serve, RANKS, a_replicas_byte, None, "load"):
        assert found["lines"] == [("ERROR", said("at load", (4, UNKNOWN)) + DETACHED)]
        assert (found["chosen"] == -7).all(), "vLLM's own"


@pytest.mark.parametrize(("at", "when"), [("load", "at load"), ("move", "after a rebalance")])
def test_strict_ends_every_ranks_process(at: str, when: str) -> None:
    for found in run_ranks(serve, RANKS, a_replicas_byte, None, at, "1"):
        text = said(when, (4, UNKNOWN))
        assert found["ended"] == text
        assert found["lines"][-1] == ("CRITICAL", f"{text}. ISOLOAD_STRICT=1 ends the process")


def without(rank: int) -> Any:
    """As the engine runs unless it is asked for; the weights cannot even be read."""
    state = model(rank, ISOLOAD_CHECK_WEIGHTS="0")
    del state.model.expert_weights
    MODELS.add(state, PARALLEL)
    dispatch.on_layer_committed(lambda *_: None, state, table(1))
    return MODELS.layers(state).weights  # type: ignore[union-attr]


def test_without_the_variable_nothing_is_read() -> None:
    assert run_ranks(without, RANKS) == [None, None]


def kept(rank: int) -> list[tuple[str, str]]:
    """vLLM's kernels route by themselves."""
    lines, state = listen(), model(rank)
    for runner in state.model.moe_layers:
        runner.is_monolithic = True
    MODELS.add(state, PARALLEL)
    dispatch.on_layer_committed(lambda *_: None, state, table(1))
    return lines[-1:]


def test_it_is_said_where_nothing_is_compared() -> None:
    line = "isoload vLLM: no weights are compared, because isoload chooses no replicas"
    assert run_ranks(kept, RANKS) == [[("WARNING", line)]] * RANKS


def differ(rank: int) -> None:
    state = model(rank)
    state.model.expert_weights[1][1] = state.model.expert_weights[1][1][:3]
    MODELS.add(state, PARALLEL)


def test_a_layer_whose_tensors_have_other_slots_is_refused() -> None:
    for outcome in rank_outcomes(differ, RANKS):
        assert outcome.error is not None and "weights must have one row for each slot" in outcome.error


def test_a_line_names_the_first_and_counts_the_rest() -> None:
    wrong = [WrongSlot(0, 0, slot, 1, None) for slot in range(NAMED + 3)]
    assert named(wrong).count("layer 0") == NAMED and named(wrong).endswith("; and 3 more")
    assert "more" not in named(wrong[:NAMED])
