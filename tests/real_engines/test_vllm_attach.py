"""Attaching to vLLM's own plug-in loader: with the variable, without it, and where a seam has moved."""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_runs import HARNESS, PACKAGE
from vllm import plugins
from vllm.distributed import parallel_state
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.policy import EPLB_POLICIES, DefaultEplbPolicy
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.v1.worker.gpu.eplb_utils import eplb_draft_model_name

import isoload
from isoload.cli.engines import ENGINES, look
from isoload.engines.seams import Seam, read_seams, wrong_check
from isoload.engines.settings import Settings
from isoload.engines.vllm import CHECKS, MODELS
from isoload.engines.vllm.placement import make_policy

AROUND = [seam for seam in read_seams("vllm") if seam.kind == "around"]


def in_place(seam: Seam) -> object:
    return pkgutil.resolve_name(seam.target)


ORIGINALS = {seam.name: in_place(seam) for seam in AROUND}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """vLLM's loader, as in a new process; what is hooked is unhooked at the end."""
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    for seam in AROUND:
        owner, _, name = seam.target.rpartition(".")
        monkeypatch.setattr(pkgutil.resolve_name(owner), name, ORIGINALS[seam.name])
    monkeypatch.setitem(EPLB_POLICIES, "default", DefaultEplbPolicy)
    monkeypatch.delenv("ISOLOAD_VLLM", raising=False)
    yield monkeypatch
    MODELS.start(Settings.read({}))


def hooked() -> set[str]:
    found = {seam.name for seam in AROUND if in_place(seam) is not ORIGINALS[seam.name]}
    return found | ({"policy"} if EPLB_POLICIES["default"] is not DefaultEplbPolicy else set())


def test_the_installed_package_has_the_entry_point() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="isoload")
    assert found.value == "isoload_engines:vllm"


def test_every_seam_is_as_the_file_says() -> None:
    assert not [fault for of in read_seams("vllm") if (fault := of.located().fault())]
    MODELS.start(Settings.read({}))
    assert not [wrong for check in CHECKS.items() if (wrong := wrong_check(*check))]
    MODELS.start(Settings.read({}))


@pytest.mark.parametrize("placer", ["eplb", "scenario:groups=8:moves=4"])
def test_with_the_variable_all_seams_are_hooked(loader: pytest.MonkeyPatch, placer: str) -> None:
    """Whatever the placer's options: they need not fit the known batch."""
    loader.setenv("ISOLOAD_VLLM", "1")
    loader.setenv("ISOLOAD_PLACER", placer)
    plugins.load_general_plugins()
    assert hooked() == {*ORIGINALS, "policy"}
    assert not MODELS.by_map, "the known batch is forgotten"


def test_modules_that_imported_a_function_by_name_get_the_hook(loader: pytest.MonkeyPatch) -> None:
    """As vLLM's model files do that route by themselves."""
    module = type(sys)("vllm.a_model")
    module.eplb_map_to_physical_and_record = base_router.eplb_map_to_physical_and_record  # type: ignore[attr-defined]
    loader.setitem(sys.modules, "vllm.a_model", module)
    loader.setenv("ISOLOAD_VLLM", "1")
    plugins.load_general_plugins()
    assert module.eplb_map_to_physical_and_record is base_router.eplb_map_to_physical_and_record
    assert "eplb_map_to_physical_and_record" in hooked()


@pytest.mark.parametrize("value", [None, "0", ""])
def test_without_the_variable_nothing_is(loader: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        loader.setenv("ISOLOAD_VLLM", value)
    plugins.load_general_plugins()
    assert hooked() == set()


def test_without_the_variable_nothing_is_imported() -> None:
    code = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
assert "isoload_engines" in sys.modules, "the plug-in was called"
assert not [name for name in sys.modules if name.split(".")[0] == "isoload"]
"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ISOLOAD_")}
    environment = kept | {"PYTHONPATH": str(PACKAGE), "ISOLOAD_VLLM": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def renamed(loader: pytest.MonkeyPatch) -> str:
    loader.delattr(eplb_state, "_commit_eplb_maps")
    return "_commit_eplb_maps cannot be found"


def other_arguments(loader: pytest.MonkeyPatch) -> str:
    loader.setattr(base_router, "eplb_map_to_physical_and_record", lambda topk_ids: topk_ids)
    return r"eplb_map_to_physical_and_record must take \(topk_ids, .*\) \(as in 0\.32\.0\), got \(topk_ids\)"


def other_field(loader: pytest.MonkeyPatch) -> str:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    loader.delattr(MoERunner, "do_naive_dispatch_combine")
    return "MoERunner has no field do_naive_dispatch_combine"


def other_result(loader: pytest.MonkeyPatch) -> str:
    def rebalance_experts(
        weight, num_replicas, num_groups, num_nodes, num_ranks, old_global_expert_indices=None
    ):
        return torch.zeros(1, num_replicas + 1, dtype=torch.int64)

    loader.setattr(DefaultEplbPolicy, "rebalance_experts", rebalance_experts)
    return "a known batch gives wrong slots with rebalance_experts"


MOVES = [renamed, other_arguments, other_field, other_result]


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_seam_is_named_and_vllm_runs_alone(
    loader: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, move
) -> None:
    message, before = move(loader), {seam.name: pkgutil.resolve_name(seam.target) for seam in AROUND[:1]}
    loader.setenv("ISOLOAD_VLLM", "1")
    with caplog.at_level(logging.ERROR, "isoload"):
        plugins.load_general_plugins()
    assert EPLB_POLICIES["default"] is DefaultEplbPolicy
    assert before == {seam.name: in_place(seam) for seam in AROUND[:1]}
    (record,) = [record for record in caplog.records if record.name == "isoload"]
    assert re.search(message, record.getMessage()) and "\n" not in record.getMessage()


@pytest.mark.parametrize("move", MOVES)
def test_strict_refuses_a_moved_seam(loader: pytest.MonkeyPatch, move) -> None:
    message = move(loader)
    loader.setenv("ISOLOAD_VLLM", "1")
    loader.setenv("ISOLOAD_STRICT", "1")
    with pytest.raises(SystemExit, match=message):
        plugins.load_general_plugins()


def test_a_bad_value_refuses_to_start(loader: pytest.MonkeyPatch) -> None:
    loader.setenv("ISOLOAD_VLLM", "yes")
    with pytest.raises(SystemExit, match="ISOLOAD_VLLM must be 0 or 1, got 'yes'"):
        plugins.load_general_plugins()


def test_the_engines_of_the_tests_choose_as_vllms_kernel(tmp_path: Path) -> None:
    """What the control runs with on a CPU; Triton's interpreter is chosen when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HARNESS / "vllm_kernel.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "equal: 32 of 32" in done.stdout, done.stderr[-3000:]


def test_the_policy_refuses_slots_that_ranks_cannot_share() -> None:
    with pytest.raises(ValueError, match="num_replicas must be a multiple of 4 ranks, got 18"):
        make_policy("eplb").rebalance_experts(torch.ones(1, 16), 18, 1, 1, 4)


def test_vllms_default_equals_eplb_that_keeps_duplicates() -> None:
    """On loads without ties. (isoload's own default moves an expert's second replica off its rank.)"""
    loads = torch.rand(6, 64, generator=torch.Generator().manual_seed(3)) * 1000
    theirs = DefaultEplbPolicy.rebalance_experts(loads, 80, 1, 2, 8)
    ours = isoload.place(loads, isoload.Topology(8), 10, placer="eplb", dedup=False)
    assert torch.equal(theirs.int(), ours.slot_to_expert)


@pytest.mark.parametrize("value", ["0", "1"])
def test_doctor_says_what_would_attach(value: str) -> None:
    environ = dict(os.environ) | {"ISOLOAD_VLLM": value, "PYTHONPATH": str(HARNESS)}
    (engine,) = [engine for engine in ENGINES if engine.name == "vLLM"]
    on, detail, asked = look(engine, environ)
    assert (on, asked) == (value == "1", value == "1"), detail
    assert "its functions are as isoload expects and a known batch comes out right; attaches" in detail


def test_a_drafts_layers_are_planned_as_the_models_are(loader: pytest.MonkeyPatch) -> None:
    """In vLLM's own state of EPLB, to which it adds a draft of experts first, with replicas of its own."""
    group = SimpleNamespace(world_size=2, rank_in_group=0, device_group=None)
    for module in (parallel_state, eplb_state):
        loader.setattr(module, "get_ep_group", lambda: group)
    loader.setattr(parallel_state, "get_node_count", lambda: 1)
    loader.setattr(eplb_state, "get_eplb_group", lambda: group)
    loader.setattr(eplb_state, "create_eplb_communicator", lambda **_: None)
    loader.setenv("ISOLOAD_VLLM", "1")
    loader.setenv("ISOLOAD_POLICY", "exact_active")
    plugins.load_general_plugins()
    parallel = SimpleNamespace(
        enable_elastic_ep=False, data_parallel_size=1, tensor_parallel_size=2, num_ubatches=0, use_ubatching=False,
        prefill_context_parallel_size=1, eplb_config=SimpleNamespace(
            use_async=False, num_redundant_experts=2, window_size=4, step_interval=8, policy="default",
            communicator="torch_gloo",
        ),
    )  # fmt: skip
    state, ids = eplb_state.EplbState(parallel, torch.device("cpu")), torch.tensor([[0, 1]] * 8)
    for name in ("draft", "model"):
        config = SimpleNamespace(model=name, compute_hash=lambda name=name: name)
        given = {"model_name": eplb_draft_model_name(config)} if name == "draft" else {}
        state.add_model(moe_model(), config, **given)
    with override_forward_context(ForwardContext({}, {}, {})):
        for of in state.model_states.values():
            (layer,) = MODELS.layers(of).by_id.values()  # type: ignore[union-attr]
            counted = torch.zeros(8, dtype=torch.int32)
            maps = of.logical_to_physical_map[0], of.logical_replica_count[0]
            slots = base_router.eplb_map_to_physical_and_record(ids, counted, *maps, torch.tensor(True))
            assert torch.bincount(slots.flatten() // 4).tolist() == [8, 8], (
                "each of two experts has two replicas"
            )
            assert layer.policy_name == "exact_active"


def moe_model() -> SimpleNamespace:
    """Six experts on two ranks, the first two with a replica."""
    runner = SimpleNamespace(
        do_naive_dispatch_combine=False,
        is_monolithic=False,
        moe_config=SimpleNamespace(is_sequence_parallel=False),
    )
    return SimpleNamespace(
        num_routed_experts=6, num_redundant_experts=2, num_physical_experts=8, num_logical_experts=6,
        num_expert_groups=1, num_moe_layers=1, num_local_physical_experts=4, moe_layers=[runner],
        expert_weights=[[torch.zeros(4, 1)]], set_eplb_state=lambda *_: None,
    )  # fmt: skip
