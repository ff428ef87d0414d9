"""vLLM's hooks on records made up here: which tokens a layer plans, what it counts, where experts have moved."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, LocalGroup
from isoload.engines.settings import ALL_LOADS, Settings
from isoload.engines.tables import replica_lists
from isoload.engines.vllm import MODELS, dispatch, layers
from isoload.engines.vllm.layers import Layer, ModelLayers, tokens_of

EXPERTS, K, RANKS, SIZE, LAYERS = 16, 4, 2, 10, 3
LOADS = torch.rand(2, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(1)).pow(4) * 1000
PARALLEL = {
    "tensor_parallel_size": 2, "data_parallel_size": 1, "prefill_context_parallel_size": 1,
    "enable_elastic_ep": False, "use_ubatching": False,
    "eplb_config": SimpleNamespace(num_redundant_experts=RANKS * SIZE - EXPERTS),
}  # fmt: skip


class State(SimpleNamespace):
    """A record of vLLM's."""


def parallel(**changed: Any) -> Any:
    return SimpleNamespace(**(PARALLEL | changed))


def runner(naive: bool = False, monolithic: bool = False, sequence_parallel: bool = False) -> Any:
    config = SimpleNamespace(is_sequence_parallel=sequence_parallel)
    return State(do_naive_dispatch_combine=naive, is_monolithic=monolithic, moe_config=config)


def state_of(placement: isoload.Placement, runners: list[Any] | None = None, name: str = "model") -> State:
    lists = replica_lists(placement)
    runners = [runner() for _ in range(LAYERS)] if runners is None else runners
    return State(
        physical_to_logical_map=lists.physical_to_logical.clone(),
        logical_to_physical_map=lists.logical_to_physical.clone(),
        model=SimpleNamespace(num_logical_experts=EXPERTS, moe_layers=runners, expert_weights=[]),
        model_name=name,
        rebalanced=False,
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of vLLM's, of rank 0, whose hooks are in place; it has no model."""
    module = ModuleType("vllm.distributed.parallel_state")
    module.get_ep_group = lambda: SimpleNamespace(world_size=RANKS, rank_in_group=0)  # type: ignore[attr-defined]
    module.get_node_count = lambda: 1  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, module)
    MODELS.start(Settings.read({}))
    yield
    MODELS.start(Settings.read({}))


def placed(number: int = 0, placer: str = "eplb") -> isoload.Placement:
    return isoload.place(LOADS[number], isoload.Topology(RANKS), SIZE, placer)


def draw(tokens: int, seed: int = 0) -> Tensor:
    skew = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(7)).pow(4)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(skew.expand(tokens, -1), K, generator=generator).int()


def layer_of(held: str = "same", naive: bool = False) -> Layer:
    return Layer(Balancer(placed(), 1, tokens="same", shared_columns=False), None, runner(naive), held)  # type: ignore[arg-type]


def mapped(layer: Layer, ids: Tensor, record: bool = True, valid: int | None = None) -> tuple[Tensor, Tensor]:
    """(slots, what was recorded)"""
    loads = torch.zeros(RANKS * SIZE, dtype=torch.int32)
    rows = None if valid is None else torch.tensor(valid, dtype=torch.int32)
    return layer.map_and_record(ids, loads, torch.tensor(record), rows), loads


OWN = (runner(), {"data_parallel_size": 2, "tensor_parallel_size": 1})
SEQUENCE = (runner(sequence_parallel=True), {"data_parallel_size": 2})
MICRO = {"use_ubatching": True}
HELD = {
    "tensor parallel": (runner(), {}, "same"),
    "data parallel": (*OWN, "own"),
    "sequence parallel": (*SEQUENCE, "own"),
    "gathered": (runner(naive=True), {"data_parallel_size": 2}, "gathered"),
    "gathered, micro-batches": (runner(naive=True), {"data_parallel_size": 2} | MICRO, "gathered"),
    "same, micro-batches": (runner(), MICRO, "same"),
    "groups of the same": (runner(), {"data_parallel_size": 2}, "tensor-parallel ranks hold the same tokens"),
    "context parallel": (runner(), {"prefill_context_parallel_size": 2}, "prefill context parallelism is on"),
    "elastic": (runner(), {"enable_elastic_ep": True}, "ranks join and leave"),
    "monolithic": (runner(monolithic=True), {}, "their kernel routes by itself"),
    "another class": (SimpleNamespace(), {}, "SimpleNamespace routes by itself"),
}  # fmt: skip


@pytest.mark.parametrize("loads", ALL_LOADS)
@pytest.mark.parametrize("name", HELD)
def test_which_tokens_a_rank_holds(name: str, loads: str) -> None:
    made, changed, want = HELD[name]
    held, reason = tokens_of(made, parallel(**changed), loads)
    assert held == want if held else want in reason


@pytest.mark.parametrize("made", [OWN, SEQUENCE])
@pytest.mark.parametrize("loads", ALL_LOADS)
def test_two_micro_batches_may_not_gather(made: Any, loads: str) -> None:
    """Where ranks hold rows of their own; what is not exchanged in a pass cannot meet another exchange there."""
    held, reason = tokens_of(made[0], parallel(**made[1] | MICRO), loads)
    if loads == "own":
        assert held == "own"
    else:
        assert held is None
        assert reason == f"two micro-batches would gather their loads at once with ISOLOAD_LOADS={loads}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize("valid", [None, 0, 5, 40])
def test_copies_are_level_and_counted(dtype: torch.dtype, valid: int | None) -> None:
    ids, rows = draw(40), 40 if valid is None else valid
    slots, loads = mapped(layer_of(), ids.to(dtype), valid=valid)
    assert slots.dtype == dtype
    slots = slots.to(torch.int32)[:rows].long()
    assert torch.equal(placed().slot_to_expert[1][slots], ids[:rows])
    assert torch.equal(loads, torch.bincount(slots.flatten(), minlength=RANKS * SIZE).int())
    per_rank = loads.view(RANKS, -1).sum(1)
    assert int(per_rank.max() - per_rank.min()) <= 1


def test_masked_copies_stay_masked_and_uncounted() -> None:
    ids = draw(12)
    ids[3], ids[5, 1] = -1, -1
    slots, loads = mapped(layer_of(), ids)
    assert torch.equal(slots < 0, ids < 0) and int(loads.sum()) == 12 * K - K - 1


def test_an_empty_batch() -> None:
    slots, loads = mapped(layer_of(), draw(3)[:0], valid=0)
    assert slots.shape == (0, K) and not loads.any()


def test_nothing_is_counted_where_vllm_records_nothing() -> None:
    slots, loads = mapped(layer_of(), draw(12), record=False)
    assert (slots >= 0).all() and not loads.any()


def test_gathered_rows_are_planned_alike_whatever_a_rank_calls_padding() -> None:
    """Each rank gives the number of its own rows; counted are those that vLLM counts."""
    ids, want = draw(30), None
    for valid in (30, 12, 0):
        slots, loads = mapped(layer_of("gathered", naive=True), ids, valid=valid)
        want = slots if want is None else want
        assert torch.equal(slots, want) and (slots >= 0).all()
        counted = torch.bincount(slots[:valid].flatten().long(), minlength=RANKS * SIZE)
        assert torch.equal(loads, counted.int())


def test_another_exchange_than_at_start_is_refused() -> None:
    layer = layer_of()
    layer.runner.do_naive_dispatch_combine = True
    with pytest.raises(RuntimeError, match="vLLM must exchange tokens as when its model was loaded"):
        mapped(layer, draw(4))


def vllms_own(topk_ids: Tensor, expert_load_view: Tensor, *given: Any) -> Tensor:
    """Slot 7 for all, and a count where it is told to record."""
    expert_load_view += 100 * given[2]
    return torch.full_like(topk_ids, 7)


def test_padding_keeps_vllms_replica_and_is_counted_once(engine: None) -> None:
    state = state_of(placed())
    MODELS.add(state, parallel())
    loads, ids = torch.zeros(RANKS * SIZE, dtype=torch.int32), draw(20)
    count, record = torch.zeros(0), torch.tensor(True)
    slots = dispatch.map_and_record(
        vllms_own, ids, loads, state.logical_to_physical_map[1], count, record, torch.tensor(15)
    )
    assert (slots[15:] == 7).all() and torch.equal(placed().slot_to_expert[1][slots[:15].long()], ids[:15])
    assert int(loads.sum()) == 15 * K


def test_what_a_newer_vllm_adds_reaches_its_own_function(engine: None) -> None:
    state, added = state_of(placed(), [runner(), runner(monolithic=True), runner()]), list[Any]()
    MODELS.add(state, parallel())

    def newer(*given: Tensor, topk_weights: Any = None) -> Tensor:
        added.append(topk_weights)
        return vllms_own(*given)

    loads, ids = torch.zeros(RANKS * SIZE, dtype=torch.int32), draw(4)
    for layer, valid in ((0, torch.tensor(2)), (1, None)):
        given = state.logical_to_physical_map[layer], torch.zeros(0), torch.tensor(True), valid
        dispatch.map_and_record(newer, ids, loads, *given, topk_weights=layer)
    dispatch.on_layer_committed(
        lambda *_, **named: added.append(named), state, placed().slot_to_expert, layers="all"
    )
    assert added == [0, 1, {"layers": "all"}]


def test_layers_without_a_balancer_are_vllms(engine: None) -> None:
    state = state_of(placed(), [runner(), runner(monolithic=True), runner()])
    MODELS.add(state, parallel())
    loads, ids = torch.zeros(RANKS * SIZE, dtype=torch.int32), draw(4)
    for layer, theirs in enumerate((False, True, False)):
        given = state.logical_to_physical_map[layer], torch.zeros(0), torch.tensor(True)
        slots = dispatch.map_and_record(vllms_own, ids, loads, *given)
        assert bool((slots == 7).all()) == theirs


def add(state: Any, **changed: Any) -> None:
    """Through the hook, as EplbState.add_model."""
    states: dict[str, Any] = {}
    holder = SimpleNamespace(model_states=states, parallel_config=parallel(**changed))
    drafts = {"model_name": "draft"} if state.model_name == "draft" else {}  # vLLM names these alone
    dispatch.add_model(
        lambda self, name, **_: states.update({name: state}), holder, state.model_name, **drafts
    )


def slots_of(state: Any, layer: int, ids: Tensor) -> Tensor:
    loads = torch.zeros(RANKS * SIZE, dtype=torch.int32)
    given = state.logical_to_physical_map[layer], torch.zeros(0), torch.tensor(True)
    return dispatch.map_and_record(vllms_own, ids, loads, *given)


def step(*states: Any, **how: bool) -> None:
    """Through the hook, as EplbState.step of a process that serves these models."""
    holder = SimpleNamespace(model_states=dict(enumerate(states)))
    dispatch.step(lambda self, *_, **__: None, holder, log_stats=False, **how)


def test_every_step_but_a_profiled_one_counts_for_every_model(engine: None) -> None:
    """As vLLM counts them towards a rebalance, for which all ranks must be at the same number."""
    states = state_of(placed()), state_of(placed(), name="draft")
    for state in states:
        add(state)
    step(*states, is_profile=True)
    step(*states)
    step(*states, is_dummy=True)
    assert [MODELS.layers(state).passes for state in states] == [2, 2]  # type: ignore[union-attr]


def test_the_hook_gives_vllm_what_it_was_given(engine: None) -> None:
    given: list[Any] = []
    holder = SimpleNamespace(model_states={})
    dispatch.step(lambda *args, **kwargs: given.append((args, kwargs)), holder, True, False, log_stats=True)
    assert given == [((holder, True, False), {"log_stats": True})]


def test_a_rebalance_reaches_the_balancers_in_place(engine: None) -> None:
    state, moved = state_of(placed()), placed(1, "trivial").slot_to_expert.long()
    add(state)
    tables = MODELS.layers(state).by_id[1].balancer.placed_on(torch.device("cpu")).tables.data  # type: ignore[union-attr]
    address, called = tables.data_ptr(), []
    dispatch.on_layer_committed(lambda *given: called.append(given), state, moved)
    assert len(called) == 1
    balancer = MODELS.layers(state).by_id[1].balancer  # type: ignore[union-attr]
    assert balancer.placed_on(torch.device("cpu")).tables.data.data_ptr() == address
    for layer in range(LAYERS):
        assert torch.equal(moved[layer][slots_of(state, layer, draw(30)).long()].int(), draw(30))


def test_an_asynchronous_rebalance_moves_layer_by_layer(engine: None) -> None:
    state, first, moved = (
        state_of(placed()),
        placed().slot_to_expert,
        placed(1, "trivial").slot_to_expert.long(),
    )
    add(state)
    dispatch.on_layer_committed(lambda *_: None, state, moved[1], 1)
    for layer in range(LAYERS):
        held = moved[1] if layer == 1 else first[layer]
        assert torch.equal(held[slots_of(state, layer, draw(30)).long()].int(), draw(30))


def test_no_plan_uses_a_half_moved_placement(engine: None) -> None:
    """While weights travel, until a layer's turn comes, and for good where it never does: by what is committed."""
    state, held = state_of(placed()), placed().slot_to_expert.long()
    moved = placed(1, "trivial").slot_to_expert.long()
    add(state)

    def plans_follow_what_is_committed(*_: Any) -> None:
        for layer in range(LAYERS):
            assert torch.equal(held[layer][slots_of(state, layer, draw(30)).long()].int(), draw(30))

    def fail(*_: Any) -> None:
        raise RuntimeError("a peer is gone")

    for layer in (2, 0):
        dispatch.on_layer_committed(plans_follow_what_is_committed, state, moved[layer], layer)
        held[layer] = moved[layer]
        plans_follow_what_is_committed()
    for given in (moved[1], 1), (moved,):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            dispatch.on_layer_committed(fail, state, *given)
        plans_follow_what_is_committed()
    state.rebalanced = True  # and vLLM's thread has ended
    step(state)
    plans_follow_what_is_committed()


def test_other_slots_are_refused(engine: None) -> None:
    state = state_of(placed())
    add(state)
    with pytest.raises(RuntimeError, match=r"vLLM must keep its \[3, 20\] slots, got \[3, 18\]"):
        dispatch.on_layer_committed(lambda *_: None, state, torch.arange(18).expand(3, -1) % EXPERTS)


def test_a_layout_that_the_placer_cannot_make_is_refused_at_start(engine: None) -> None:
    MODELS.start(Settings.read({"ISOLOAD_PLACER": "scenario:groups=5"}))
    with pytest.raises(
        ValueError, match="--enable-eplb with ISOLOAD_PLACER=scenario:groups=5: groups must divide"
    ):
        add(state_of(placed()))


def test_a_policy_of_shared_experts_is_refused_at_start(engine: None) -> None:
    MODELS.start(Settings.read({"ISOLOAD_POLICY": "joint"}))
    with pytest.raises(ValueError, match="ISOLOAD_POLICY must be a policy of routed experts"):
        add(state_of(placed()))


LOADS_OF = {
    "nothing said": ({}, "own"),
    "a policy": ({"ISOLOAD_POLICY": "lp"}, "gathered"),
    "exact by name": ({"ISOLOAD_POLICY": "exact"}, "gathered"),
    "own by name": ({"ISOLOAD_POLICY": "exact", "ISOLOAD_LOADS": "own"}, "own"),
    "gathered": ({"ISOLOAD_LOADS": "gathered"}, "gathered"),
}


@pytest.mark.parametrize("name", LOADS_OF)
def test_whose_counts_plan_tokens_of_ones_own(
    engine: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    environ, loads = LOADS_OF[name]
    monkeypatch.setattr(ModelLayers, "group", lambda self, topology: LocalGroup(topology))
    MODELS.start(Settings.read(environ))
    states = [state_of(placed(), name=str(number)) for number in range(3)]
    with caplog.at_level(logging.INFO, "isoload"):
        for state, changed in zip(states, (OWN[1], PARALLEL, OWN[1] | MICRO), strict=True):
            add(state, **changed)
    own, same, micro = MODELS.by_state.values()
    assert {layer.balancer.loads for layer in own.by_id.values()} == {loads}
    assert {layer.balancer.tokens for layer in same.by_id.values()} == {"same"}
    assert len(micro.by_id) == (LAYERS if loads == "own" else 0)
    said = caplog.records[0].getMessage()
    assert f"replicas (tokens of their own, loads {loads}: " in said and "on 3 of 3 layers" in said
    refused = f"stays on 3 layers of 2: two micro-batches would gather their loads at once with ISOLOAD_LOADS={loads}"
    assert (refused in caplog.text) == (loads == "gathered")


def test_the_log_says_what_is_attached_and_what_is_not(
    engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "isoload"):
        add(state_of(placed(), [runner(), runner(monolithic=True), runner()]))
        add(state_of(isoload.place(LOADS[0], isoload.Topology(RANKS)), name="draft"))
    assert [record.getMessage() for record in caplog.records] == [
        "isoload: attached to vLLM's EPLB of model: replicas (same tokens on all ranks, no collective), "
        "policy exact on 2 of 2 layers; placer eplb",
        "isoload: vLLM's own choice of replicas stays on 1 layers of model: their kernel routes by itself",
        "isoload: attached to vLLM's EPLB of draft: replicas (same tokens on all ranks, no collective), "
        "policy exact on 0 of 3 layers: no layer has redundant experts, so there is nothing to balance; placer eplb",
    ]


def test_the_served_model_is_measured_drafts_are_not(engine: None, caplog: pytest.LogCaptureFixture) -> None:
    MODELS.start(Settings.read({"ISOLOAD_REPORT_SECONDS": "0.000001"}))
    model, draft = state_of(placed()), state_of(placed(), name="draft")
    for state in (draft, model):  # as vLLM has it
        add(state)
        slots_of(state, 1, draw(30))
    assert MODELS.layers(draft).by_id[1].meter is None  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO, "isoload"):
        step(model, draft)
    assert "isoload vLLM: 1 plans of 1 layers" in caplog.records[-1].getMessage()


def test_a_model_that_vllm_drops_is_forgotten(engine: None) -> None:
    """Else its weights would stay in memory, and its addresses would lead another model's batches astray."""
    state = state_of(placed())
    add(state)
    layer = weakref.ref(state.model.moe_layers[0])
    assert len(MODELS.by_map) == LAYERS and len(MODELS.by_state) == 1
    del state
    gc.collect()
    assert not MODELS.by_map and not MODELS.by_state and layer() is None


def test_a_map_of_other_sizes_is_refused(engine: None) -> None:
    """With both numbers and the option to type; in shadow mode too, but not for a draft, whose sizes may differ."""
    slots = (
        r"vLLM's map of model has 20 slots in each layer but the engine has 18 \(16 experts and 2 redundant ones\) "
        r"on 2 expert-parallel ranks: pass --eplb-config '\{\"num_redundant_experts\": 4\}'$"
    )
    odd = "the engine has 19 slots in each layer .* its 2 expert-parallel ranks cannot share evenly: pass .*: 4}'"
    layers = "vLLM's map of model has 3 layers but the model has 2$"
    for runners, redundant, said in ((3, 2, slots), (3, 3, odd), (2, 4, layers)):
        eplb = SimpleNamespace(num_redundant_experts=redundant)
        for mode in ({}, {"ISOLOAD_MODE": "shadow", "ISOLOAD_REPORT_SECONDS": "60"}):
            MODELS.start(Settings.read(mode))
            with pytest.raises(ValueError, match=said):
                MODELS.add(state_of(placed(), [runner()] * runners), parallel(eplb_config=eplb))
    MODELS.start(Settings.read({}))
    MODELS.add(state_of(placed()), parallel(eplb_config=SimpleNamespace(num_redundant_experts=2)), draft=True)


KEPT = "vLLM's own choice of replicas stays on every layer. Start vLLM without the options that the lines above name"
UNUSED = [
    (
        {},
        runner(),
        [
            "ISOLOAD_LOADS=own has no effect: all ranks route the same tokens, so each has the counts of all. Pass "
            "--data-parallel-size and an --all2all-backend such as deepep_low_latency, or unset ISOLOAD_LOADS"
        ],
    ),
    (
        {},
        runner(monolithic=True),
        [f"ISOLOAD_LOADS=own has no effect: {KEPT}, or unset ISOLOAD_LOADS"],
    ),
    ({"data_parallel_size": 2, "tensor_parallel_size": 1}, runner(), []),
]


@pytest.mark.parametrize(("changed", "made", "lines"), UNUSED)
def test_a_variable_without_effect_is_logged(
    engine: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, int],
    made: Any,
    lines: list[str],
) -> None:
    """Once, for the served model."""
    MODELS.start(Settings.read({"ISOLOAD_LOADS": "own"}))
    monkeypatch.setattr(ModelLayers, "group", lambda self, topology: LocalGroup(topology))
    with caplog.at_level(logging.WARNING, "isoload"):
        for draft in (True, False):
            MODELS.add(state_of(placed(), [made] * LAYERS), parallel(**changed), draft=draft)
    assert [record.getMessage() for record in caplog.records] == [f"isoload: {line}" for line in lines]


def test_in_shadow_mode_variables_of_choices_have_no_effect(
    engine: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layers, "most_decoded", lambda *_: 4)
    shadow = {
        "ISOLOAD_MODE": "shadow",
        "ISOLOAD_REPORT_SECONDS": "60",
        "ISOLOAD_RECORD_EVERY": "8",
    }  # the last has one
    MODELS.start(Settings.read(shadow | {"ISOLOAD_LOADS": "own", "ISOLOAD_PLACER": "scenario"}))
    with caplog.at_level(logging.WARNING, "isoload"):
        MODELS.add(state_of(placed()), parallel())
    shadow_only = "vLLM chooses and rebalances in shadow mode. Set ISOLOAD_MODE=on"
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "has no effect" in line] == [
        f"isoload: ISOLOAD_LOADS=own has no effect: {shadow_only}, or unset ISOLOAD_LOADS",
        f"isoload: ISOLOAD_PLACER=scenario has no effect: {shadow_only}, or unset ISOLOAD_PLACER",
    ]


def test_a_policy_for_each_phase_is_refused() -> None:
    settings = Settings.read({"ISOLOAD_POLICY": "prefill=exact,decode=exact_active"})
    with pytest.raises(ValueError, match="removed in vLLM, .*: use one policy, got 'prefill=exact,decode"):
        MODELS.start(settings)
    MODELS.start(Settings.read({"ISOLOAD_POLICY": "prefill=exact,decode=exact"}))
    MODELS.start(Settings.read({}))
