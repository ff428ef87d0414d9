"""One process of SGLang's own classes: `dynamic` through SGLang's functions, HashTopK, draft models, two batches at
once, compilation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_process import ORIGINAL, RANKS, draw, info_of, own_tokens, peak, published, resolved, same_tokens
from ranks import EXPERTS, LAYER, K, skewed_counts
from sglang.srt.eplb import lplb_solver
from sglang.srt.eplb.expert_location_dispatch import (
    _topk_ids_logical_to_physical_dynamic,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope
from sglang.srt.runtime_context import get_model
from torch import Tensor

import isoload
from isoload import Balancer
from isoload.engines.sglang import LAYERS, dispatch
from isoload.engines.sglang.dispatch import WaterfillBalancer
from isoload.engines.sglang.layers import Layer, prefill_graphs
from isoload.online import switch


@pytest.mark.parametrize("valid", [None, 50, 0])
def test_dynamic_over_an_all_to_all_splits_a_ranks_own_copies(
    attached: None, placement: isoload.Placement, valid: int | None
) -> None:
    LAYERS.by_id = {LAYER: own_tokens(placement)}
    ids, rows = draw(64), 64 if valid is None else valid
    info = resolved(info_of(placement, "dynamic"), None if valid is None else torch.tensor(valid))
    info.rank_invariant = False
    slots = dispatch.map_dynamic(_topk_ids_logical_to_physical_dynamic, ids, info)
    assert slots.dtype == ids.dtype
    assert torch.equal(placement.slot_to_expert[LAYER][slots.long()], ids), "padding, too, has a slot"
    tables = LAYERS.by_id[LAYER].balancer.placed_on(torch.device("cpu")).tables
    none = torch.zeros(RANKS, dtype=torch.int32)
    sent = isoload.ops.plan_own(isoload.count(ids[:rows], EXPERTS), tables, none, 1, layer=LAYER)
    assert torch.equal(torch.bincount(slots[:rows].flatten(), minlength=len(sent)), sent.long())
    kept = LAYERS.by_id[LAYER].balancer.own_counts
    assert kept is not None and bool(kept.recent.any()) == bool(rows)


@pytest.mark.parametrize("valid", [None, 50])
def test_dynamic_is_level_and_padding_keeps_sglangs_replica(
    attached: None, placement: isoload.Placement, valid: int | None
) -> None:
    LAYERS.by_id = {LAYER: same_tokens(placement)}
    ids, rows = draw(64), valid or 64
    info = resolved(info_of(placement, "dynamic"), None if valid is None else torch.tensor(valid))
    slots = dispatch.map_dynamic(_topk_ids_logical_to_physical_dynamic, ids, info)
    stock = _topk_ids_logical_to_physical_dynamic(ids, info)
    assert slots.dtype == ids.dtype
    assert torch.equal(placement.slot_to_expert[LAYER][slots.long()], ids)
    assert torch.equal(slots[rows:], stock[rows:])
    plan = LAYERS.by_id[LAYER].balancer.last_plan
    assert plan is not None and peak(slots[:rows], placement) == int(plan.peak) == int(plan.bound)
    assert peak(slots[:rows], placement) < peak(stock[:rows], placement)


def test_other_dispatches_stay_sglangs(attached: None, placement: isoload.Placement) -> None:
    LAYERS.by_id = {LAYER: same_tokens(placement)}
    info, ids = resolved(info_of(placement, "fake")), draw(20)
    assert torch.equal(dispatch.map_dynamic(lambda topk_ids, _: topk_ids + 1, ids, info), ids + 1)


def test_draft_layers_are_left_to_sglang(attached: None, placement: isoload.Placement) -> None:
    LAYERS.by_id = {LAYER: same_tokens(placement)}
    found = dispatch.resolve_routing_inputs(ORIGINAL, layer_id=LAYER, is_draft=True)
    assert found == (None, None) and LAYERS.by_id[LAYER].num_valid is None


def test_two_batches_may_overlap(attached: None) -> None:
    """Two-batch overlap runs the stages of two batches in turn; a batch's shared copies stay its own."""
    placement = isoload.place(skewed_counts(), isoload.Topology(1), EXPERTS + 1, num_shared=1)
    layer = Layer(Balancer(placement, LAYER, "joint", shared_columns=False), None)
    first = layer.solve(draw(8, 1))
    assert layer.take_shared(8).shape == (8, 1)
    second = layer.solve(draw(5, 2))
    with pytest.raises(RuntimeError, match="must have the 5 tokens that were planned, got 8"):
        layer.take_shared(8)
    layer.solve(draw(3, 3))
    with pytest.raises(RuntimeError, match="Waterfill did not take the shared copies"):
        layer.solve(draw(4, 4))
    assert len(first) == 8 and len(second) == 5


def test_hash_topk(attached: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4's layers choose experts by token: lp through the real class, its Waterfill after it."""
    from sglang.srt.configs.shared_experts import SharedExpertsConfig
    from sglang.srt.layers.moe import hash_topk

    monkeypatch.setenv("SGLANG_OPT_USE_FUSED_HASH_TOPK", "0")
    fields = {"ep_dispatch_algorithm": "lp", "ep_num_redundant_experts": 2, "moe_a2a_backend": "deepep"}
    with published(enable_waterfill=True, **fields):
        monkeypatch.setattr(hash_topk, "resolve_routing_inputs", resolve_with(info_of(single(), "lp")))
        monkeypatch.setattr(hash_topk, "topk_ids_logical_to_physical", dispatch.map_solved)
        shared = SharedExpertsConfig(fusion_disabled=False, num_fused_shared_experts=1, use_waterfill=True)
        with get_model().override(shared_experts=shared):
            router = hash_topk.HashTopK(K, EXPERTS, vocab_size=64, layer_id=LAYER)
        layer = Layer(Balancer(single(), LAYER, shared_columns=False), None)
        LAYERS.by_id = {LAYER: layer}
        LAYERS.tables, LAYERS._num_experts = single().slot_to_expert, EXPERTS
        LAYERS._topology = isoload.Topology(1)
        lplb_solver.set_global_lplb_solver(LAYER, layer)
        router.waterfill_balancer = WaterfillBalancer(EXPERTS + 2, 1, 0, LAYER, 0.4)
        tokens = torch.arange(10) % 7
        made = router(torch.zeros(10, 8), torch.rand(10, EXPERTS), tokens, torch.tensor(8))
        slots = made.topk_ids
        assert slots.shape == (10, K + 1) and (slots[8:] == -1).all()
        assert torch.equal(single().slot_to_expert[LAYER][slots[:8, :-1].long()], router.tid2eid[tokens[:8]])
        assert (slots[:8, -1] == EXPERTS + 2).all() and (made.topk_weights[:8, -1] - 0.4).abs().max() < 1e-6
        assert router.empty_topk_output(torch.device("cpu")).topk_ids.shape == (0, K + 1)


def single() -> isoload.Placement:
    """One rank, two redundant experts."""
    return isoload.place(skewed_counts(), isoload.Topology(1), EXPERTS + 2, dedup=False)


def resolve_with(info: Any) -> Any:
    """SGLang's resolve_routing_inputs with isoload's hook, for this dispatch."""

    def resolve(
        *, layer_id: int, is_draft: bool, num_token_non_padded: Any, expert_location_dispatch_info: Any
    ) -> Any:
        return dispatch.resolve_routing_inputs(
            ORIGINAL, layer_id=layer_id, is_draft=is_draft, num_token_non_padded=num_token_non_padded,
            expert_location_dispatch_info=info,
        )  # fmt: skip

    return resolve


def test_waterfill_of_a_draft_model_is_its_own(attached: None) -> None:
    """Its layer's number may be that of a layer of the model, whose shared copies it must not take."""
    LAYERS.by_id = {LAYER: Layer(Balancer(single(), LAYER, shared_columns=False), None)}
    LAYERS.tables, LAYERS._num_experts = single().slot_to_expert, EXPERTS
    LAYERS._topology = isoload.Topology(1)
    own = WaterfillBalancer(EXPERTS + 2, 1, 0, LAYER, 0.4)
    draft = WaterfillBalancer(EXPERTS, 1, 0, LAYER, 0.4)
    assert own.layer is LAYERS.by_id[LAYER] and draft.layer is None
    out = draft.expand_topk(StandardTopKOutput(torch.ones(6, K), draw(6), None), 6)
    assert (out.topk_ids[:, -1] == EXPERTS).all()
    with pytest.raises(RuntimeError, match="Waterfill must come after the layer's plan"):
        own.expand_topk(StandardTopKOutput(torch.ones(6, K), draw(6), None), 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of shared_weight and routed_scaling_factor must be given, got None and None"),
        ({"shared_weight": 1.0, "routed_scaling_factor": 1.0}, "must be given, got 1.0 and 1.0"),
    ],
)
def test_waterfill_refuses(attached: None, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WaterfillBalancer(8, 1, 0, LAYER, **arguments)
    with pytest.raises(ValueError, match="num_routed_experts must be a multiple of 3, got 8"):
        WaterfillBalancer(8, 3, 0, LAYER, 1.0)


@pytest.mark.parametrize("held", [same_tokens, own_tokens])
def test_dynamic_compiles_whole_once_for_all_layers(
    attached: None, placement: isoload.Placement, held: Callable[..., Layer]
) -> None:
    """SGLang compiles its dispatch of CUDA tensors, for any number of tokens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    infos = []
    for layer in range(placement.num_layers):
        info = info_of(placement, "dynamic", layer)
        info.isoload_layer, info.isoload_num_valid = held(placement, layer), torch.tensor(4)
        infos.append(info)

    def dispatched(ids: Tensor, info: Any) -> Tensor:
        return dispatch.map_dynamic(_topk_ids_logical_to_physical_dynamic, ids, info)

    compiled = torch.compile(dispatched, dynamic=True, fullgraph=True, backend="aot_eager")
    for info in infos:
        for tokens in (5, 9, 33):
            assert torch.equal(compiled(draw(tokens), info), dispatched(draw(tokens), info))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("valid", [None, 20])
@pytest.mark.parametrize("word", ["on", "off"])
def test_a_switch_chooses_between_sglangs_slots_and_isoloads(
    attached: None,
    placement: isoload.Placement,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    valid: int | None,
) -> None:
    """Of rows of padding too, which are SGLang's whatever stands."""
    monkeypatch.setattr(switch, "READ_EVERY", 0.0)
    (tmp_path / "said").write_text(word)
    made = switch.Switch(str(tmp_path / "said"), torch.device("cpu"), None, "SGLang")
    for _ in range(switch.AGREE_EVERY):
        made.step_ended()
    ids, rows = draw(30), None if valid is None else torch.tensor(valid)
    stock, found = _topk_ids_logical_to_physical_dynamic, []
    for turned in (None, made):
        LAYERS.by_id = {LAYER: same_tokens(placement)}
        LAYERS.by_id[LAYER].switch = turned
        found.append(dispatch.map_dynamic(stock, ids, resolved(info_of(placement, "dynamic"), rows)))
    theirs = stock(ids, info_of(placement, "dynamic"))
    assert not torch.equal(found[0], theirs)
    assert torch.equal(found[1], found[0] if word == "on" else theirs)


PHASED = {"prefill": isoload.POLICIES["exact"](), "decode": isoload.POLICIES["exact_active"]()}


@pytest.fixture
def phased(attached: None, placement: isoload.Placement) -> Layer:
    LAYERS.by_id, LAYERS.in_prefill_graph = {LAYER: same_tokens(placement)}, prefill_graphs()
    LAYERS.by_id[LAYER].plan_by(PHASED)
    return LAYERS.by_id[LAYER]


def chosen(placement: isoload.Placement) -> str:
    """By whose plan SGLang's dispatch maps a batch."""
    ids, stock = draw(64), _topk_ids_logical_to_physical_dynamic
    slots = dispatch.map_dynamic(stock, ids, resolved(info_of(placement, "dynamic")))
    plans = {
        phase: Balancer(placement, LAYER, policy, tokens="same", shared_columns=False)(ids)
        for phase, policy in PHASED.items()
    }
    (phase,) = [phase for phase, plan in plans.items() if torch.equal(plan, slots)]
    return phase


def serve_pass(mode: ForwardMode, extend: bool, body: Callable[[], str], draft: bool = False) -> str:
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=extend)
    runner = SimpleNamespace(is_draft_worker=draft)
    return dispatch.forward(lambda self, forward_batch: body(), runner, batch)


@pytest.mark.parametrize(
    ("mode", "extend", "phase"),
    [
        (ForwardMode.EXTEND, False, "prefill"), (ForwardMode.MIXED, False, "prefill"),
        (ForwardMode.DECODE, False, "decode"), (ForwardMode.IDLE, False, "decode"),
        (ForwardMode.TARGET_VERIFY, False, "decode"), (ForwardMode.DECODE, True, "prefill"),
        (ForwardMode.IDLE, True, "prefill"),
    ],
)  # fmt: skip
def test_the_pass_says_the_phase(
    phased: Layer, placement: isoload.Placement, mode: ForwardMode, extend: bool, phase: str
) -> None:
    """extend: whether some rank has prefill, as SGLang's ranks have agreed."""
    assert serve_pass(mode, extend, lambda: chosen(placement)) == phase


def test_a_graph_is_captured_with_its_phases_policy(phased: Layer, placement: isoload.Placement) -> None:
    """Also where SGLang captures decode's after a prefill, and in the scope of its prefill runner."""
    assert chosen(placement) == "decode"
    assert serve_pass(ForwardMode.EXTEND, True, lambda: chosen(placement)) == "prefill"
    with pytest.raises(ZeroDivisionError):
        serve_pass(ForwardMode.EXTEND, True, lambda: str(1 / 0))
    assert chosen(placement) == "decode"
    with prefill_graph_scope(full_graph=True):
        assert chosen(placement) == "prefill"
    assert chosen(placement) == "decode"


def test_a_drafts_pass_is_no_phase_of_the_models(phased: Layer, placement: isoload.Placement) -> None:
    assert serve_pass(ForwardMode.EXTEND, True, lambda: LAYERS.phase, draft=True) == "decode"


def test_phases_that_ranks_do_not_agree_about_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    with pytest.raises(
        ValueError, match="one for prefill and decode while SGLANG_SCHEDULER_SKIP_ALL_GATHER is set"
    ):
        prefill_graphs()
    monkeypatch.delenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER")
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner_utils.prefill_graph", None)
    with pytest.raises(
        ValueError, match="with this SGLang, which does not state which graphs are of prefill"
    ):
        prefill_graphs()
