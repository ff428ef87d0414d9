"""One process of SGLang's own classes: `dynamic` through SGLang's functions, HashTopK, draft models, two batches at
once, compilation, reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepseek_config import make_config
from ranks import EXPERTS, LAYER, K, skewed_counts
from sglang.srt.eplb import expert_location, lplb_solver
from sglang.srt.eplb.expert_location_dispatch import (
    ExpertLocationDispatchInfo,
    _topk_ids_logical_to_physical_dynamic,
)
from sglang.srt.layers.moe import topk as sglang_topk
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_context, get_model, get_parallel
from torch import Tensor

import isoload
from isoload import Balancer
from isoload.integrations.engine_tables import replica_lists
from isoload.integrations.meter import GAUGES, Meter
from isoload.integrations.settings import Settings
from isoload.integrations.sglang import LAYERS, dispatch
from isoload.integrations.sglang.layers import Layer
from isoload.integrations.sglang.waterfill import WaterfillBalancer

RANKS = 4
ORIGINAL = sglang_topk.resolve_routing_inputs


@pytest.fixture
def placement() -> isoload.Placement:
    return isoload.place(skewed_counts(), isoload.Topology(RANKS), EXPERTS // RANKS + 2)


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a process whose hooks are attached, with none that is."""
    LAYERS.start(Settings.read({}))
    yield
    LAYERS.reset()


def published(**fields: Any) -> Any:
    """SGLang's configuration of a process, inside a with block."""
    return get_context().override_server_args(device="cpu", **fields)


def draw(tokens: int, seed: int = 0) -> Tensor:
    skew = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(7)).pow(4)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(skew.expand(tokens, -1), K, generator=generator).int()


def info_of(placement: isoload.Placement, algorithm: str, layer: int = LAYER) -> Any:
    lists = replica_lists(placement)
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=None,
        partial_logical_to_all_physical_map=lists.logical_to_physical[layer],
        partial_logical_to_all_physical_map_num_valid=lists.num_replicas[layer],
        num_physical_experts=placement.num_slots,
        rank_invariant=True,
    )


def same_tokens(placement: isoload.Placement, layer: int = LAYER) -> Layer:
    return Layer(Balancer(placement, layer, tokens="same", shared_columns=False), None)


def resolved(info: Any, num_valid: Tensor | None = None) -> Any:
    return dispatch.resolve_routing_inputs(
        ORIGINAL,
        layer_id=LAYER,
        is_draft=False,
        num_token_non_padded=num_valid,
        expert_location_dispatch_info=info,
    )[1]


def peak(slots: Tensor, placement: isoload.Placement) -> int:
    return int(torch.bincount(slots.flatten().long() // placement.slots_per_rank, minlength=RANKS).max())


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


@pytest.mark.parametrize("algorithm", ["fake", "static"])
def test_other_dispatches_stay_sglangs(attached: None, placement: isoload.Placement, algorithm: str) -> None:
    LAYERS.by_id = {LAYER: same_tokens(placement)}
    info, ids = resolved(info_of(placement, algorithm)), draw(20)
    assert dispatch.map_dynamic(lambda topk_ids, _: topk_ids + 1, ids, info) is not ids
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


def test_dynamic_compiles_whole_once_for_all_layers(attached: None, placement: isoload.Placement) -> None:
    """SGLang compiles its dispatch of CUDA tensors, for any number of tokens."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    infos = []
    for layer in range(placement.num_layers):
        info = info_of(placement, "dynamic", layer)
        info.isoload_layer, info.isoload_num_valid = same_tokens(placement, layer), torch.tensor(4)
        infos.append(info)

    def dispatched(ids: Tensor, info: Any) -> Tensor:
        return dispatch.map_dynamic(_topk_ids_logical_to_physical_dynamic, ids, info)

    compiled = torch.compile(dispatched, dynamic=True, fullgraph=True, backend="aot_eager")
    for info in infos:
        for tokens in (5, 9, 33):
            assert torch.equal(compiled(draw(tokens), info), dispatched(draw(tokens), info))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_locations_update_reaches_the_balancers(attached: None, tmp_path: Path) -> None:
    """Behind dynamic, through SGLang's own metadata: made when it is set, refreshed in place when experts move."""
    from sglang.srt.configs.model_config import ModelConfig

    fields = {"ep_dispatch_algorithm": "dynamic", "ep_num_redundant_experts": 4, "moe_a2a_backend": "none"}
    with published(tp_size=2, ep_size=2, **fields):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        model = ModelConfig(str(make_config(tmp_path / "config")))
        made = expert_location.ExpertLocationMetadata
        first, second = (
            made.init_by_eplb(model, counts) for counts in (skewed_counts(), skewed_counts().flip(-1))
        )
        dispatch.set_metadata(expert_location.set_global_expert_location_metadata, first)
        layer = LAYERS.by_id[LAYER]
        tables = layer.balancer.placed_on(torch.device("cpu")).tables.data
        address = tables.data_ptr()
        dispatch.update_metadata(made.update, first, second, [LAYER])
        assert LAYERS.by_id[LAYER] is layer and address == tables.data_ptr()
        for i, want in ((0, first), (LAYER, second), (2, first)):
            held = LAYERS.by_id[i].balancer.placement.slot_to_expert[i]
            assert torch.equal(held.long(), want.physical_to_logical_map_cpu[i]), i
        assert torch.equal(
            layer.balancer.placed_on(torch.device("cpu")).slot_to_expert.long(),
            second.physical_to_logical_map[LAYER],
        )
        ids = draw(30)
        slots = layer.slots(ids, None)
        assert torch.equal(second.physical_to_logical_map[LAYER][slots.long()].int(), ids)


def test_a_layout_that_the_placer_cannot_make_is_refused_at_start(attached: None) -> None:
    with published(eplb_algorithm="isoload"):
        every = SimpleNamespace(
            ep_size=2, num_logical_experts=4, physical_to_logical_map_cpu=torch.arange(10).view(1, 10) % 4
        )
        with pytest.raises(
            ValueError, match="--eplb-algorithm isoload with ISOLOAD_PLACER=eplb: slots_per_rank must"
        ):
            dispatch.set_metadata(lambda value, allow_overwrite: None, every)


def test_a_policy_of_shared_experts_is_refused_where_the_model_has_none(
    attached: None, placement: isoload.Placement
) -> None:
    """--enable-waterfill is given, and the model does not fuse its shared experts: SGLang says nothing."""
    LAYERS.start(Settings.read({"ISOLOAD_POLICY": "joint"}))
    LAYERS.by_id = {LAYER: same_tokens(placement)}
    with published():
        with pytest.raises(ValueError, match="ISOLOAD_POLICY must be a policy of routed experts"):
            dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=True))


@pytest.mark.parametrize(
    ("fields", "waterfill", "lines"),
    [
        (
            {"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "deepep", "eplb_algorithm": "isoload"},
            3,
            [
                "isoload: attached to SGLang's --enable-waterfill, policy waterfill on 3 layers; "
                "--eplb-algorithm isoload, placer eplb",
                "isoload: SGLang's own --ep-dispatch-algorithm dynamic stays with --moe-a2a-backend deepep: "
                "isoload's are dynamic with none, lp with others",
            ],
        ),
        (
            {"ep_dispatch_algorithm": "static", "moe_a2a_backend": "deepep"},
            0,
            [
                "isoload: attached to SGLang's loader, and to none of its options",
                "isoload: SGLang's own --ep-dispatch-algorithm static stays with --moe-a2a-backend deepep: "
                "isoload's are dynamic with none, lp with others",
            ],
        ),
    ],
)
def test_the_log_says_what_is_not_attached(
    attached: None, caplog: pytest.LogCaptureFixture, fields: dict[str, str], waterfill: int, lines: list[str]
) -> None:
    LAYERS.num_waterfill = waterfill
    with published(**fields), caplog.at_level(logging.INFO, "isoload"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
    assert [record.getMessage() for record in caplog.records] == lines


def test_without_redundant_experts_the_log_says_so(attached: None, caplog: pytest.LogCaptureFixture) -> None:
    single = isoload.place(skewed_counts(), isoload.Topology(RANKS))
    LAYERS.by_id = {LAYER: same_tokens(single)}
    with published(ep_dispatch_algorithm="dynamic"), caplog.at_level(logging.INFO, "isoload"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
    assert "on 0 of 1 layers: no layer has redundant experts, so there is nothing to balance" in caplog.text


def test_reports_are_gauges_too(placement: isoload.Placement, caplog: pytest.LogCaptureFixture) -> None:
    from prometheus_client import REGISTRY

    meter = Meter("SGLang", 0.0)
    layer = Layer(same_tokens(placement).balancer, meter)
    layer.slots(draw(64), None)
    with caplog.at_level(logging.INFO, "isoload"):
        meter.report_if_due()
    values = {name: REGISTRY.get_sample_value(f"isoload_{name}") for name in GAUGES}
    assert values["certified_share"] == 1.0 and 1 <= values["imbalance_after"] <= values["imbalance_before"]
    assert f"{values['imbalance_after']:.3f} planned" in caplog.text and values["plan_seconds"] > 0
