"""Attaching to SGLang's own plug-in loader: with the variable, without it, and where a seam has moved."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
import sglang.srt.managers.scheduler  # noqa: F401
from engine_runs import HARNESS, PACKAGE
from sglang.srt import plugins
from sglang.srt.eplb import eplb_algorithms, expert_location_dispatch
from sglang.srt.layers.moe import topk, waterfill
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components import moe_ep_setup
from sglang.srt.plugins.hook_registry import HookRegistry

from isoload.cli.engines import ENGINES, look
from isoload.engines.seams import EXTRA, SHADOW, of_mode, read_seams, wrong_check
from isoload.engines.settings import SPARE, Settings
from isoload.engines.sglang import CHECKS, LAYERS


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """SGLang's loader, as in a new process, up to where hooks are applied."""
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.delenv("ISOLOAD_SGLANG", raising=False)
    yield monkeypatch
    HookRegistry.reset()
    LAYERS.start(Settings.read({}))


def hooked() -> set[str]:
    return {target.rsplit(".", 1)[-1] for target in HookRegistry._hooks}


def test_the_installed_package_has_the_entry_point() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="isoload")
    assert found.value == "isoload_engines:sglang"


def test_every_seam_is_as_the_file_says() -> None:
    assert not [fault for of in read_seams("sglang") if (fault := of.located().fault())]
    assert not [wrong for check in CHECKS.items() if (wrong := wrong_check(*check))]


@pytest.mark.parametrize("placer", ["eplb", "scenario:groups=8:moves=4"])
def test_with_the_variable_all_seams_are_hooked(loader: pytest.MonkeyPatch, placer: str) -> None:
    """Whatever the placer's options: they need not fit the known batch."""
    loader.setenv("ISOLOAD_SGLANG", "1")
    loader.setenv("ISOLOAD_PLACER", placer)
    plugins.load_plugins()
    seams = of_mode(read_seams("sglang"), "on")
    assert hooked() == {seam.name for seam in seams if seam.kind in ("replace", "around")}


def test_spare_slots_have_their_own(loader: pytest.MonkeyPatch) -> None:
    loader.setenv("ISOLOAD_SGLANG", "1")
    loader.setenv("ISOLOAD_STRICT", "1")
    loader.setenv("ISOLOAD_SPARE_SLOTS", "1")
    loader.setenv("ISOLOAD_POLICY", "prefill=llep:within=node,decode=exact")
    plugins.load_plugins()
    seams = of_mode(read_seams("sglang"), "on", {SPARE.name})
    assert hooked() == {seam.name for seam in seams if seam.kind in ("replace", "around")}
    assert not LAYERS.lost


def test_in_shadow_mode_its_own_are(loader: pytest.MonkeyPatch) -> None:
    for name, value in {"SGLANG": "1", "MODE": "shadow", "REPORT_SECONDS": "1", "STRICT": "1"}.items():
        loader.setenv(f"ISOLOAD_{name}", value)
    plugins.load_plugins()
    seams = of_mode(read_seams("sglang"), "shadow")
    assert hooked() == {seam.name for seam in seams if seam.kind in ("replace", "around")}


@pytest.mark.parametrize("value", [None, "0", ""])
def test_without_the_variable_nothing_is(loader: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        loader.setenv("ISOLOAD_SGLANG", value)
    plugins.load_plugins()
    assert hooked() == set()


@pytest.mark.parametrize(("variable", "scheduler"), [("0", True), ("1", False)])
def test_nothing_is_imported_where_it_is_not_wanted(variable: str, scheduler: bool) -> None:
    """Without the variable, and in a process without a model, as the detokenizer's."""
    code = f"""
import os, sys, torchvision_names
os.environ["ISOLOAD_SGLANG"] = {variable!r}
from sglang.srt.plugins import load_plugins
if {scheduler}: sys.modules["sglang.srt.managers.scheduler"] = sys
load_plugins()
assert "isoload_engines" in sys.modules, "the plug-in was called"
assert not [name for name in sys.modules if name.split(".")[0] == "isoload"]
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ISOLOAD_")}
    return kept | {"PYTHONPATH": f"{HARNESS}{os.pathsep}{PACKAGE}", "HF_HUB_OFFLINE": "1"}


# Each moves one seam and says what the line has of it, and the options that stay without.
def renamed(loader: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    loader.delattr(moe_ep_setup, "init_lplb_solvers")
    return r"init_lplb_solvers cannot be found .*\(needed by lp[;)]", {"lp"}


def for_two(loader: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    loader.delattr(topk, "resolve_routing_inputs")  # as in 0.5.22
    return r"resolve_routing_inputs cannot be found .*\(needed by dynamic and lp[;)]", {"dynamic", "lp"}


def for_all(loader: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    loader.setattr(ModelRunner, "initialize", lambda self, memory: None)
    return r"initialize must take \(self\)", set(CHECKS)


def other_arguments(loader: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    loader.setattr(expert_location_dispatch, "_topk_ids_logical_to_physical_dynamic", lambda topk_ids: None)
    said = r"_topk_ids_logical_to_physical_dynamic must take \(topk_ids, info\) \(as in 0\.5\.23\), got \(topk_ids\)"
    return said, {"dynamic"}


def other_result(loader: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    stock = eplb_algorithms.rebalance_experts

    def rebalance_experts(
        tokens_per_expert, num_physical_experts, num_local_physical_experts, num_groups, num_nodes, algorithm
    ):  # fmt: skip
        tables = stock(
            tokens_per_expert,
            num_physical_experts,
            num_local_physical_experts,
            num_groups,
            num_nodes,
            algorithm,
        )
        return tables[:2]

    loader.setattr(eplb_algorithms, "rebalance_experts", rebalance_experts)
    return "a known batch fails with --eplb-algorithm isoload", {"--eplb-algorithm isoload"}


MOVES = [renamed, for_two, for_all, other_arguments, other_result]


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_seam_is_named_and_its_options_stay_without(
    loader: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, move
) -> None:
    message, lost = move(loader)
    loader.setenv("ISOLOAD_SGLANG", "1")
    with caplog.at_level(logging.ERROR, "isoload"):
        plugins.load_plugins()
    left = set(CHECKS) - {SHADOW, *EXTRA} - lost
    hooks = [seam for seam in of_mode(read_seams("sglang"), "on") if seam.kind in ("replace", "around")]
    assert hooked() == {seam.name for seam in hooks if left and (left & {*seam.serves} or not seam.serves)}
    assert LAYERS.lost == lost if left else not LAYERS.lost
    (record,) = [record for record in caplog.records if record.name == "isoload"]
    assert re.search(message, record.getMessage()) and "\n" not in record.getMessage()


@pytest.mark.parametrize("move", MOVES)
def test_strict_refuses_a_moved_seam(loader: pytest.MonkeyPatch, move) -> None:
    """SGLang's loader logs an Exception and goes on; SystemExit passes."""
    message, _ = move(loader)
    loader.setenv("ISOLOAD_SGLANG", "1")
    loader.setenv("ISOLOAD_STRICT", "1")
    with pytest.raises(SystemExit, match=message):
        plugins.load_plugins()


def test_a_bad_value_refuses_to_start(loader: pytest.MonkeyPatch) -> None:
    loader.setenv("ISOLOAD_SGLANG", "1")
    loader.setenv("ISOLOAD_STRICT", "yes")
    with pytest.raises(SystemExit, match="ISOLOAD_STRICT must be 0 or 1, got 'yes'"):
        plugins.load_plugins()


def test_the_older_spelling_of_waterfill_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def __init__(self, num_routed_experts, world_size, rank, layer_id, routed_scaling_factor=1.0):
            pass

    monkeypatch.setattr(waterfill, "WaterfillBalancer", Older)
    assert not [fault for of in read_seams("sglang") if (fault := of.located().fault())]
    assert "routed_scaling_factor" in str(inspect.signature(Older))


@pytest.mark.parametrize("value", ["0", "1"])
def test_doctor_says_what_would_attach(value: str) -> None:
    environ = dict(os.environ) | {"ISOLOAD_SGLANG": value, "PYTHONPATH": str(HARNESS)}
    (engine,) = [engine for engine in ENGINES if engine.name == "SGLang"]
    on, detail, asked = look(engine, environ)
    assert (on, asked) == (value == "1", value == "1"), detail
    assert "its functions are as isoload expects and a known batch comes out right; attaches" in detail
