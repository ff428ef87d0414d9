"""When SGLang has loaded its model, or moves experts: Balancers made and refreshed, refusals, what the log says."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepseek_config import make_config
from one_process import RANKS, draw, own_tokens, published, same_tokens
from ranks import EXPERTS, LAYER, skewed_counts
from ranks import LAYERS as NUM_LAYERS
from sglang.srt.eplb import expert_location
from sglang.srt.runtime_context import get_parallel

import isoload
from isoload.engines.settings import Settings
from isoload.engines.sglang import LAYERS, dispatch, layers
from isoload.engines.sglang import placement as sglang_placement
from isoload.engines.sglang.dispatch import DeepEPWaterfillBalancer
from isoload.engines.sglang.layers import Layer


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
        sglang_placement.update_metadata(made.update, first, second, [LAYER])
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
            ep_size=2,
            num_layers=1,
            num_logical_experts=4,
            physical_to_logical_map_cpu=torch.arange(10).view(1, 10) % 4,
        )
        with pytest.raises(
            ValueError, match="--eplb-algorithm isoload with ISOLOAD_PLACER=eplb: slots_per_rank must"
        ):
            dispatch.set_metadata(lambda value, allow_overwrite=False: None, every)


@pytest.mark.parametrize(("placer", "anew"), [("scenario", False), ("eplb", True)])
def test_a_placer_that_can_starts_from_where_experts_lie(attached: None, placer: str, anew: bool) -> None:
    """With the counts of before an expert that need not move stays in its slot, wherever that is."""
    LAYERS.start(Settings.read({"ISOLOAD_PLACER": placer}))
    counts = skewed_counts()
    shuffled = place_anew(counts).slot_to_expert.view(3, RANKS, -1).flip(1, 2).reshape(3, -1).long()
    with published(tp_size=RANKS, ep_size=RANKS):
        chosen = sglang_placement.compute_algorithm(lambda *_: None, "isoload", None, 1)
        found = []
        for now in (None, running(shuffled)):
            expert_location.set_global_expert_location_metadata(now, allow_overwrite=True)
            size = shuffled.shape[1] // RANKS
            args = counts, shuffled.shape[1], size, None, 1, chosen
            found.append(sglang_placement.rebalance_experts(lambda *_: None, *args)[0])
    stays = [float((table == shuffled).float().mean()) for table in found]
    assert torch.equal(*found) if anew else stays[1] > 0.9 > stays[0]


def place_anew(counts: torch.Tensor) -> isoload.Placement:
    return isoload.place(counts[0], isoload.Topology(RANKS), EXPERTS // RANKS + 2, placer="scenario")


def running(table: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        physical_to_logical_map_cpu=table, num_logical_experts=EXPERTS, num_physical_experts=table.shape[1]
    )


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
            {"ep_dispatch_algorithm": "fake", "moe_a2a_backend": "deepep", "eplb_algorithm": "isoload"},
            3,
            [
                "isoload: attached to SGLang's --enable-waterfill, policy waterfill on 3 layers; "
                "--eplb-algorithm isoload, placer eplb",
                "isoload: SGLang's own --ep-dispatch-algorithm fake stays: isoload's are dynamic and lp",
            ],
        ),
        (
            {"ep_dispatch_algorithm": "static", "moe_a2a_backend": "deepep"},
            0,
            [
                "isoload: attached to SGLang's loader, and to none of its options",
                "isoload: SGLang's own --ep-dispatch-algorithm static stays: isoload's are dynamic and lp",
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


def test_the_log_names_options_that_stay_without(
    attached: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waterfill alone, as in SGLang up to 0.5.16, which has no get_exec; then dynamic and Waterfill."""
    from sglang.srt import runtime_context

    get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
    every = {"dynamic", "lp", "--eplb-algorithm isoload", "Waterfill"}
    DeepEPWaterfillBalancer(4, 1, 0, -1, routed_scaling_factor=2.0)
    with caplog.at_level(logging.INFO, "isoload"), monkeypatch.context() as older:
        older.delattr(runtime_context, "get_exec")
        LAYERS.lost = frozenset(every - {"Waterfill"})
        LAYERS.announce()
    assert [record.getMessage() for record in caplog.records] == [
        "isoload: attached to SGLang's --enable-deepep-waterfill, policy waterfill on 1 layers; not to "
        "--eplb-algorithm isoload, dynamic, lp, where this SGLang is not as isoload expects"
    ]
    caplog.clear()
    LAYERS.num_waterfill, LAYERS.lost = 0, frozenset({"lp", "--eplb-algorithm isoload"})
    with (
        published(ep_dispatch_algorithm="static", eplb_algorithm="isoload"),
        caplog.at_level(logging.INFO, "isoload"),
    ):
        LAYERS.announce()
    first, second = [record.getMessage() for record in caplog.records]
    assert "and to none of its options; not to --eplb-algorithm isoload, lp, where" in first
    assert second.endswith("--ep-dispatch-algorithm static stays: isoload's are dynamic")


def test_dynamic_that_is_lost_gets_no_balancers(attached: None) -> None:
    every = SimpleNamespace(ep_size=2, num_layers=1, num_logical_experts=4)
    every.physical_to_logical_map_cpu = every.physical_to_logical_map = torch.arange(10).view(1, 10) % 4
    with published(ep_dispatch_algorithm="dynamic", moe_a2a_backend="none"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        for lost in ({"dynamic"}, set()):
            LAYERS.lost = frozenset(lost)
            dispatch.set_metadata(lambda value, allow_overwrite=False: None, every)
            assert bool(LAYERS.by_id) == (not lost)


@pytest.mark.parametrize("loads", ["gathered", "own"])
def test_the_log_says_whose_counts(
    attached: None, placement: isoload.Placement, caplog: pytest.LogCaptureFixture, loads: str
) -> None:
    LAYERS.by_id = {LAYER: own_tokens(placement, loads=loads)}
    with published(ep_dispatch_algorithm="lp"), caplog.at_level(logging.INFO, "isoload"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
    assert f"--ep-dispatch-algorithm lp (loads {loads}: " in caplog.text
    assert ("no collective in a pass, targets renewed every 16 passes" in caplog.text) == (loads == "own")


@pytest.mark.parametrize(
    ("fields", "variables", "message"),
    [
        (
            {},
            {"ISOLOAD_LOADS": "gathered"},
            "ISOLOAD_LOADS must be own with .* got 'gathered'",
        ),
        ({}, {"ISOLOAD_LOADS": "node"}, "because ranks without tokens join no gather .* got 'node'"),
        (
            {},
            {"ISOLOAD_POLICY": "lp"},
            "ISOLOAD_POLICY must be exact if ISOLOAD_LOADS is own.*'lp'",
        ),
        (
            {"elastic_ep_backend": "mooncake"},
            {"ISOLOAD_LOADS": "node"},
            "--elastic-ep-backend must come with .* dynamic and ISOLOAD_LOADS own, got 'mooncake' .* node",
        ),
        (
            {"elastic_ep_backend": "mooncake"},
            {"ISOLOAD_CHECK_WEIGHTS": "1"},
            "--elastic-ep-backend must come without ISOLOAD_SWITCH and ISOLOAD_CHECK_WEIGHTS, .* 'mooncake' with one",
        ),
        ({}, {"ISOLOAD_POLICY": "joint"}, "ISOLOAD_POLICY must be a policy of routed experts"),
    ],
)
def test_counts_that_dynamic_cannot_have_are_refused_at_start(
    attached: None, fields: dict[str, str], variables: dict[str, str], message: str
) -> None:
    LAYERS.start(Settings.read(variables))
    every = SimpleNamespace(ep_size=2, num_layers=1, num_logical_experts=4)
    every.physical_to_logical_map_cpu = every.physical_to_logical_map = torch.arange(10).view(1, 10) % 4
    fields = {"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "deepep"} | fields
    with published(**fields), pytest.raises(ValueError, match=message):
        dispatch.set_metadata(lambda value, allow_overwrite=False: None, every)


@pytest.mark.parametrize("loads", ["gathered", "own"])
def test_lp_of_own_counts_is_for_every_model(attached: None, loads: str) -> None:
    """SGLang's list is of models whose ranks without tokens join a gather: here there is none."""
    LAYERS.start(Settings.read({"ISOLOAD_LOADS": loads}))
    architecture = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]))
    with published(ep_dispatch_algorithm="lp", moe_a2a_backend="deepep"):
        if loads == "own":
            return dispatch.init_lplb_solvers(model_config=architecture)
        with pytest.raises(NotImplementedError, match="Qwen3MoeForCausalLM"):
            dispatch.init_lplb_solvers(model_config=architecture)


def test_passes_of_draft_models_are_not_counted(attached: None) -> None:
    for is_draft in (True, False, True):
        out = dispatch.forward(lambda self, batch: batch, SimpleNamespace(is_draft_worker=is_draft), "batch")
        assert out == "batch"
    assert LAYERS.passes == 1


def test_without_redundant_experts_the_log_says_so(attached: None, caplog: pytest.LogCaptureFixture) -> None:
    single = isoload.place(skewed_counts(), isoload.Topology(RANKS))
    LAYERS.by_id = {LAYER: same_tokens(single)}
    with published(ep_dispatch_algorithm="dynamic"), caplog.at_level(logging.INFO, "isoload"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
    assert "on 0 of 1 layers: no layer has redundant experts, so there is nothing to balance" in caplog.text


def test_a_loaded_models_metrics_begin_under_its_own_rank(
    attached: None, placement: isoload.Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of a rank that has joined is that of the group it joined, not SGLang's count of its own."""
    from prometheus_client import REGISTRY

    monkeypatch.setattr(logging.getLogger("isoload"), "filters", [])
    for joined, served in ((0, "served"), (2, None)):
        LAYERS.start(Settings.read({"ISOLOAD_REPORT_SECONDS": "3600"}))
        LAYERS.by_id = {LAYER: Layer(same_tokens(placement).balancer, None)}
        monkeypatch.setattr(layers, "joined_behind", lambda joined=joined: joined)
        runner = SimpleNamespace(
            is_draft_worker=False, server_args=SimpleNamespace(served_model_name=served),
            model_config=SimpleNamespace(model_path="a path"), model=SimpleNamespace(),
        )  # fmt: skip
        with published(ep_dispatch_algorithm="dynamic"):
            get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
            dispatch.initialize(lambda self: None, runner)
        LAYERS.by_id[LAYER].slots(draw(64), None)
        labels = {"model": served or "a path", "engine": "SGLang", "rank": str(joined)}
        assert REGISTRY.get_sample_value("isoload_attached", labels) == 1
        assert REGISTRY.get_sample_value("isoload_plan_seconds_count", labels) == 1
        with published(ep_dispatch_algorithm="dynamic"):
            LAYERS.detach()
        LAYERS.step_ended()
        assert REGISTRY.get_sample_value("isoload_attached", labels) == 0
        assert REGISTRY.get_sample_value("isoload_fallbacks_total", labels) == 1


def test_a_model_is_not_measured_unless_reports_are_asked_for(
    attached: None, placement: isoload.Placement
) -> None:
    LAYERS.by_id = {LAYER: same_tokens(placement)}
    with published(ep_dispatch_algorithm="dynamic"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
    assert not LAYERS.metrics.on


@pytest.mark.parametrize("mode", ["on", "shadow"])
@pytest.mark.parametrize(
    ("content", "redundant", "said"),
    [
        (
            {"physical_to_logical_map": [[*range(EXPERTS), 0, 1, 2, 3]] * NUM_LAYERS},
            2,
            rf"placement.json has {EXPERTS + 4} slots in each layer but the engine has {EXPERTS + 2} "
            rf"\({EXPERTS} experts and 2 redundant ones\) on 2 expert-parallel ranks: pass "
            "--ep-num-redundant-experts 4, or a file made by isoload place "
            rf"--ranks 2 --slots-per-rank {EXPERTS // 2 + 1}",
        ),
        (
            {"physical_to_logical_map": [[*range(EXPERTS), 0, 1, 2]] * NUM_LAYERS},
            2,
            rf"placement.json has {EXPERTS + 3} slots in each layer but .* ranks: pass a file made by isoload place",
        ),
        (
            {"physical_to_logical_map": [[*range(EXPERTS), 0, 1]] * (NUM_LAYERS + 1)},
            2,
            rf"placement.json has {NUM_LAYERS + 1} layers but the model has {NUM_LAYERS}: isoload place --model",
        ),
        (
            {"physical_to_logical_map": [[*range(EXPERTS), 0, EXPERTS]] * NUM_LAYERS},
            2,
            rf"placement.json has experts 0 to {EXPERTS} but the model has {EXPERTS}, from 0",
        ),
        (
            {"physical_to_logical_map": [[*range(EXPERTS), 0, 1, 2]] * NUM_LAYERS},
            3,
            rf"the engine has {EXPERTS + 3} slots in each layer \({EXPERTS} experts and 3 redundant ones\), which "
            "its 2 expert-parallel ranks cannot share evenly: pass --ep-num-redundant-experts 4",
        ),
        (
            {"logical_count": [[[1] * EXPERTS] * (NUM_LAYERS - 1)]},
            2,
            rf"placement.json has {NUM_LAYERS - 1} layers but the model has {NUM_LAYERS}",
        ),
        (
            {"logical_count": [[1] * (EXPERTS + 1)] * NUM_LAYERS},
            2,
            rf"placement.json has counts of {EXPERTS + 1} experts but the model has {EXPERTS}",
        ),
        ({"physical_to_logical_map": [[*range(EXPERTS), 0, 1]] * NUM_LAYERS}, 2, None),
        ({"logical_count": [[1] * EXPERTS] * NUM_LAYERS}, 2, None),
    ],
)
def test_a_file_of_other_sizes_is_refused_before_sglang_reads_it(
    attached: None, tmp_path: Path, mode: str, content: dict[str, object], redundant: int, said: str | None
) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    shadow = {"ISOLOAD_MODE": mode, "ISOLOAD_REPORT_SECONDS": "60"} if mode == "shadow" else {}
    LAYERS.start(Settings.read(shadow))
    path, reached = tmp_path / "placement.json", []
    path.write_text(json.dumps(content))
    fields = {"ep_num_redundant_experts": redundant, "init_expert_location": str(path), "ep_size": 2}
    with published(tp_size=2, ep_dispatch_algorithm="dynamic", moe_a2a_backend="none", **fields):
        get_parallel().override_permanently(tp_rank=1, moe_ep_rank=1)
        runner = SimpleNamespace(
            is_draft_worker=False,
            model_config=ModelConfig(str(make_config(tmp_path / "config"))),
            model=None,
            server_args=SimpleNamespace(served_model_name="model"),
        )
        with nullcontext() if said is None else pytest.raises(ValueError, match=said):
            dispatch.initialize(reached.append, runner)
    assert len(reached) == (said is None)


UNUSED = [
    (
        {"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "none"},
        {"ISOLOAD_LOADS": "own", "ISOLOAD_PLACER": "scenario", "ISOLOAD_POLICY": "exact"},
        [
            "ISOLOAD_LOADS=own has no effect: all ranks hold the same tokens without an all-to-all backend, so each "
            "has the counts of all. Pass --moe-a2a-backend deepep, or unset ISOLOAD_LOADS",
            "ISOLOAD_PLACER=scenario has no effect: SGLang's own --eplb-algorithm places experts. Pass --enable-eplb "
            "--eplb-algorithm isoload, or unset ISOLOAD_PLACER",
        ],
    ),
    (
        {"ep_dispatch_algorithm": "static", "moe_a2a_backend": "deepep"},
        {"ISOLOAD_LOADS": "own", "ISOLOAD_POLICY": "exact", "ISOLOAD_RECORD_EVERY": "8"},
        [
            "ISOLOAD_POLICY=exact has no effect: SGLang's own --ep-dispatch-algorithm static chooses replicas. Pass "
            "--ep-dispatch-algorithm dynamic, or unset ISOLOAD_POLICY",
            "ISOLOAD_LOADS=own has no effect: SGLang's own --ep-dispatch-algorithm static chooses replicas. Pass "
            "--ep-dispatch-algorithm dynamic, or unset ISOLOAD_LOADS",
            "ISOLOAD_RECORD_EVERY=8 has no effect: no passes are recorded. Set ISOLOAD_MODE=shadow, or unset "
            "ISOLOAD_RECORD_EVERY",
        ],
    ),
    ({"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "none"}, {"ISOLOAD_PLACER": "eplb"}, []),
    (
        {"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "deepep", "eplb_algorithm": "isoload"},
        {"ISOLOAD_LOADS": "own", "ISOLOAD_PLACER": "scenario"},
        [],
    ),
]


@pytest.mark.parametrize(("fields", "variables", "lines"), UNUSED)
def test_a_variable_without_effect_is_logged(
    attached: None,
    placement: isoload.Placement,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, str],
    variables: dict[str, str],
    lines: list[str],
) -> None:
    LAYERS.start(Settings.read(variables))
    if fields["ep_dispatch_algorithm"] == "dynamic":
        of_rank = same_tokens if fields["moe_a2a_backend"] == "none" else own_tokens
        LAYERS.by_id = {LAYER: of_rank(placement)}
    with published(**fields), caplog.at_level(logging.WARNING, "isoload"):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        dispatch.initialize(lambda self: None, SimpleNamespace(is_draft_worker=False))
    assert [record.getMessage() for record in caplog.records] == [f"isoload: {line}" for line in lines]
