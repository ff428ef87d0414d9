"""vLLM's hooks of shadow mode on records made up here: vLLM's own choice comes back, and is counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload.analysis.rank_loads import read_recorded
from isoload.engines.record import EngineRecord
from isoload.engines.settings import Settings
from isoload.engines.tables import replica_lists
from isoload.engines.vllm import MODELS, dispatch
from isoload.engines.vllm.layers import served_name

EXPERTS, RANKS, SIZE, LAYERS = 8, 2, 5, 3
PARALLEL = {
    "tensor_parallel_size": 2, "data_parallel_size": 1, "prefill_context_parallel_size": 1,
    "enable_elastic_ep": False, "use_ubatching": False,
    "eplb_config": SimpleNamespace(num_redundant_experts=RANKS * SIZE - EXPERTS),
}  # fmt: skip


STATES: dict[str, Any] = {}  # of vLLM's EplbState


class Record(SimpleNamespace):
    """One of vLLM's."""


def placed(seed: int = 0) -> isoload.Placement:
    counts = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return isoload.place(counts, isoload.Topology(RANKS), SIZE)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process of rank 0 in shadow mode, without a model; the folder that it records to."""
    state, config = ModuleType("vllm.distributed.parallel_state"), ModuleType("vllm.config")
    state.get_ep_group = lambda: SimpleNamespace(world_size=RANKS, rank_in_group=0)  # type: ignore[attr-defined]
    state.get_node_count = lambda: 1  # type: ignore[attr-defined]
    scheduler = SimpleNamespace(max_num_seqs=4)
    drafts = SimpleNamespace(num_speculative_tokens=1)
    config.get_current_vllm_config = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        scheduler_config=scheduler, speculative_config=drafts
    )
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, state)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    given = {"ISOLOAD_MODE": "shadow", "ISOLOAD_RECORD": str(tmp_path), "ISOLOAD_RECORD_EVERY": "1"}
    MODELS.start(Settings.read(given))
    yield tmp_path
    forget()
    STATES.clear()
    MODELS.start(Settings.read({}))


def runner(naive: bool = False, monolithic: bool = False) -> Any:
    config = Record(is_sequence_parallel=False)
    return Record(do_naive_dispatch_combine=naive, is_monolithic=monolithic, moe_config=config)


def add(*runners: Any, name: str = "model", **changed: Any) -> Record:
    """A model, through the hook."""
    STATES.pop(name, None)
    lists, held = replica_lists(placed()), runners or [runner() for _ in range(LAYERS)]
    state = Record(
        physical_to_logical_map=lists.physical_to_logical.clone(),
        logical_to_physical_map=lists.logical_to_physical.clone(),
        model=SimpleNamespace(num_logical_experts=EXPERTS, moe_layers=held, expert_weights=[]),
        model_name=name,
        rebalanced=False,
    )
    holder = SimpleNamespace(model_states=STATES, parallel_config=SimpleNamespace(**(PARALLEL | changed)))
    drafts = {"model_name": name} if name == "draft" else {}  # vLLM names these alone
    dispatch.add_model(lambda self, **_: STATES.update({name: state}), holder, **drafts)
    return state


def choice(
    ids: Tensor, loads: Tensor, maps: Tensor, count: Tensor, enabled: Tensor, valid: Any = None
) -> Tensor:
    """vLLM's own, of the last replica; it records."""
    slots = maps[ids.long(), (maps[ids.long()] >= 0).sum(-1) - 1]
    loads += torch.bincount(slots.flatten(), minlength=len(loads)).to(loads.dtype)
    return slots.to(ids.dtype)


def route(state: Any, layer: int, ids: Tensor, valid: int | None = None) -> tuple[Tensor, Tensor]:
    """(slots, what vLLM has recorded), through the hook and without it: they are the same."""
    maps, count, enabled = state.logical_to_physical_map[layer], torch.zeros(0), torch.tensor(False)
    rows = None if valid is None else torch.tensor(valid, dtype=torch.int32)
    found = []
    for call in (lambda *given: dispatch.map_and_record(choice, *given), choice):
        loads = torch.zeros(RANKS * SIZE, dtype=torch.int32)
        found.append((call(ids, loads, maps, count, enabled, rows), loads))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.long(), theirs.long())
    return found[0]


def step(around: Any = lambda self, *_, **__: None, **how: bool) -> None:
    dispatch.step(around, SimpleNamespace(model_states=STATES), log_stats=False, **how)


def record() -> EngineRecord | None:
    return next((layers.record for layers in MODELS.by_state.values()), None)


def forget() -> None:
    """What is recorded is written."""
    for layers in MODELS.by_state.values():
        if layers.record is not None:
            layers.record.close()


def draw(tokens: int, seed: int) -> Tensor:
    return torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(2).indices.int()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_what_vllm_chose_comes_back_and_is_counted(engine: Path, dtype: torch.dtype) -> None:
    """Whether vLLM records a pass or not, its own padding aside; a drafting model is none of it."""
    add(name="draft")  # first, as vLLM has it
    assert record() is None
    state = add()
    assert record() is not None and len(MODELS.by_map) == LAYERS
    want = torch.zeros(2, LAYERS, RANKS * SIZE, dtype=torch.int64)
    for number, (tokens, valid) in enumerate([(12, 9), (12, 8)]):
        for layer in range(LAYERS):
            slots, _ = route(state, layer, draw(tokens, 10 * number + layer).to(dtype), valid)
            want[number, layer] = torch.bincount(slots[:valid].long().flatten(), minlength=RANKS * SIZE)
        step(is_dummy=number == 1)
    forget()
    recorded = read_recorded(engine)
    assert recorded.phases == ("prefill", "decode"), "of 4 requests with a draft each"
    assert np.array_equal(np.stack([recorded.slot_copies(b) for b in range(2)]), want.numpy())
    assert recorded.trace.name == "model" and recorded.same_tokens


def test_profiling_passes_are_forgotten(engine: Path) -> None:
    state = add()
    route(state, 0, draw(5, 1))
    step(is_profile=True)
    route(state, 1, draw(5, 2))
    step()
    forget()
    recorded = read_recorded(engine)
    assert recorded.trace.layer_ids == (1,) and recorded.trace.num_batches == 1


@pytest.mark.parametrize("one_layer", [False, True])
def test_a_rebalance_begins_a_file(engine: Path, one_layer: bool) -> None:
    """Inside of the step, of all layers or of one; the pass before it lies in the old slots."""
    state, after = add(), placed(3).slot_to_expert.long()

    def commit(state: Any, rows: Tensor, layer: int | None = None) -> None:
        which = slice(None) if layer is None else layer
        state.physical_to_logical_map[which] = rows

    def moving(self: Any, *_: Any, **__: Any) -> None:
        dispatch.on_layer_committed(commit, state, *((after[1], 1) if one_layer else (after,)))

    route(state, 1, draw(6, 1))
    step(moving)
    route(state, 1, draw(6, 2))
    step()
    forget()
    recorded = read_recorded(engine)
    assert len(list(engine.iterdir())) == 2 and recorded.table_of.tolist() == [0, 1]
    for batch, table in enumerate((placed().slot_to_expert[1], after[1])):
        assert np.array_equal(recorded.tables[batch][0], table.numpy())


def test_gathered_rows_are_counted_whatever_a_rank_calls_padding(engine: Path) -> None:
    state = add(*[runner(naive=True) for _ in range(LAYERS)], data_parallel_size=2)
    route(state, 0, draw(10, 1), 4)
    assert (of := record()) is not None and int(of.recorder._now[0].sum()) == 20
    assert (of.tokens, of.decode_tokens) == ("same", 16)


def test_layers_that_are_not_counted_are_said(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "isoload"):
        state = add(runner(), runner(monolithic=True), runner())
        route(state, 1, draw(4, 1))
        assert (of := record()) is not None and not of.recorder._now.any()
        forget()
        MODELS.by_state.clear()
        add(runner(), *[runner(naive=True)] * 2, data_parallel_size=2, tensor_parallel_size=1)
    assert "in shadow 1 layers of model are not counted: their kernel routes by itself" in caplog.text
    assert (
        "model is not counted: all of its layers must hold tokens in the same way" in caplog.text
        and record() is None
    )


def test_models_are_called_as_they_are_served() -> None:
    config = SimpleNamespace(served_model_name="served")
    assert served_name((None, config), {}) == served_name((None,), {"model_config": config}) == "served"
    assert served_name((None, object()), {}) == ""
