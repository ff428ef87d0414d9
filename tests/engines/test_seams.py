"""Seams: what an engine has against what the plug-in was written for, on modules made up here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from isoload.engines.seams import (
    EXTRA,
    PAGES,
    SHADOW,
    PlugIn,
    Seam,
    bare_signature,
    missing_package,
    of_mode,
    read_seams,
)
from isoload.engines.settings import SGLANG, Settings


class Output(NamedTuple):
    ids: int
    weights: int


@dataclass
class Locations:
    table: int

    @property
    def num_layers(self) -> int:
        return 1

    def update(self, other: Locations, layers: list[int]) -> None: ...


class Balancer:
    def __init__(self, rank: int, layer_id: int, weight: float = 1.0) -> None: ...


def dispatch(topk_ids: int, info: object = None, *, layer: int) -> int:
    return topk_ids


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("made_up_engine")
    for item in (Output, Locations, Balancer, dispatch):
        setattr(module, item.__name__, item)
    monkeypatch.setitem(sys.modules, "made_up_engine", module)
    yield


def seam(target: str, kind: str, *signatures: str) -> Seam:
    return Seam(f"made_up_engine.{target}", kind, signatures, "1.2", "why")  # type: ignore[arg-type]


def test_as_expected(engine: None) -> None:
    good = [
        seam("dispatch", "around", "(topk_ids, info=None, *, layer)"),
        seam("Balancer", "call", "(rank, layer_id)"),
        seam("Balancer", "around", "(rank, layer_id)"),
        seam("Balancer", "replace", "(rank, layer_id)", "(rank, layer_id, weight=1.0)"),
        seam("Locations.update", "around", "(self, other, layers)"),
        seam("Locations", "fields", "table", "num_layers"),
        seam("Output", "fields", "weights"),
    ]
    assert [of.fault() for of in good] == [None] * len(good)


BAD = {
    "renamed": (seam("route", "around", "()"), "made_up_engine.route cannot be found (AttributeError: "),
    "gone": (Seam("nowhere.at", "call", ("()",), "1.2", ""), "nowhere.at cannot be found (ModuleNotFoundError: "),
    "argument": (
        seam("dispatch", "around", "(topk_ids, info=None)"),
        "made_up_engine.dispatch must take (topk_ids, info=None) (as in 1.2), got (topk_ids, info=None, *, layer)",
    ),
    "dropped": (seam("Balancer", "replace", "(rank, layer_id)"), "got (rank, layer_id, weight=1.0)"),
    "default": (seam("Balancer", "replace", "(rank, layer_id, weight)"), "got (rank, layer_id, weight=1.0)"),
    "both": (seam("Balancer", "replace", "(a)", "(b)"), "must take (a) or (b) (as in 1.2)"),
    "field": (seam("Locations", "fields", "table", "ep_size"), "made_up_engine.Locations has no field ep_size"),
    "tuple": (seam("Output", "fields", "logits"), "made_up_engine.Output has no field logits"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_names_what_has_moved(engine: None, name: str) -> None:
    moved, message = BAD[name]
    found = moved.fault()
    assert found is not None and message in found and "\n" not in found


def test_annotations_are_no_part_of_a_signature() -> None:
    assert str(bare_signature(dispatch)) == "(topk_ids, info=None, *, layer)"


def test_the_file_of_sglang() -> None:
    """Each hooked seam has its hook, and says why; nothing of SGLang is imported to read it."""
    seams = read_seams("sglang")
    assert len({s.name for s in seams}) == len(seams)
    assert all(s.why and s.read_from and s.target.startswith("sglang.srt.") for s in seams)
    assert not any(name.split(".")[0] == "sglang" for name in sys.modules)
    from isoload.engines.sglang import CHECKS, HOOKS

    hooked = [s for s in seams if s.kind in ("replace", "around")]
    older = {s.older.rsplit(".", 1)[-1] for s in hooked if s.older}
    in_shadow, on = ({s.name for s in of_mode(hooked, mode)} for mode in ("shadow", "on"))
    extra = {option: {s.name for s in of_mode(hooked, "on", {option})} - on for option in EXTRA}
    assert in_shadow - on == {"_post_process_topk_ids"} and len(in_shadow) == 5
    assert [len(names) for names in extra.values()] == [10, 6], "without its variable none of these is hooked"
    assert set().union(in_shadow, on, older, *extra.values()) == set(HOOKS)
    assert {option for s in seams for option in s.serves} == set(CHECKS)


def test_the_file_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function to be wrapped has its hook, and the policy of rebalances is replaced in vLLM's table."""
    from isoload.engines import vllm

    policy, wrapped = ModuleType("vllm.distributed.eplb.policy"), []
    policy.EPLB_POLICIES, policy.AbstractEplbPolicy = {"default": None}, object  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.distributed.eplb.policy"):
        monkeypatch.setitem(sys.modules, name, policy)
    monkeypatch.setattr(vllm, "wrap", lambda target, around: wrapped.append(target.rsplit(".", 1)[-1]))
    seams = [seam for seam in read_seams("vllm") if seam.kind in ("replace", "around")]
    vllm.hook(seams, Settings.read({}))
    assert set(wrapped) == set(vllm.HOOKS) and len(seams) == len(wrapped) + 1
    assert policy.EPLB_POLICIES["default"].__name__ == "IsoloadEplbPolicy"  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_hooks_around_pass_on_what_a_newer_version_adds(engine: str) -> None:
    module = importlib.import_module(f"isoload.engines.{engine}")
    around = [seam for seam in read_seams(engine) if seam.kind == "around"]
    assert around
    for seam in around:
        hook = module.HOOKS[seam.name]
        assert any(p.kind is p.VAR_KEYWORD for p in signature(hook).parameters.values()), seam.name


def test_shadow_mode_of_vllm_leaves_its_rebalances(monkeypatch: pytest.MonkeyPatch) -> None:
    from isoload.engines import vllm

    policy, wrapped = ModuleType("vllm.distributed.eplb.policy"), {}
    policy.EPLB_POLICIES = {"default": "vLLM's"}  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.distributed.eplb.policy"):
        monkeypatch.setitem(sys.modules, name, policy)
    monkeypatch.setattr(
        vllm, "wrap", lambda target, around: wrapped.update({target.rsplit(".", 1)[-1]: around})
    )
    seams = [seam for seam in of_mode(read_seams("vllm"), "shadow") if seam.kind in ("replace", "around")]
    vllm.hook(seams, Settings.read({"ISOLOAD_MODE": "shadow", "ISOLOAD_REPORT_SECONDS": "1"}))
    assert wrapped == vllm.HOOKS and policy.EPLB_POLICIES == {"default": "vLLM's"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["on", "off", "shadow"])
def test_a_mode_attaches_what_is_its_own(
    monkeypatch: pytest.MonkeyPatch, engine: None, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """Whatever has moved of the other mode is no fault in this one, nor is its check run."""
    given = {
        "ISOLOAD_SGLANG": "1",
        "ISOLOAD_MODE": mode,
        "ISOLOAD_STRICT": "1",
        "ISOLOAD_REPORT_SECONDS": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    both = replace(seam("dispatch", "around", "(topk_ids, info=None, *, layer)"), serves=("lp", SHADOW))
    moved = replace(seam("route", "around", "()"), serves=(SHADOW,) if mode == "on" else ("lp",))
    hooked: list[Seam] = []
    checks = {"lp": lambda: mode == "on", SHADOW: lambda: mode == "shadow"}
    plug_in = PlugIn(
        "Engine", SGLANG, lambda settings: None, checks, lambda seams, _: hooked.extend(seams), [both, moved]
    )
    with caplog.at_level("INFO", "isoload"):
        plug_in.attach_or_leave()
    if mode == "off":
        assert not hooked and "ISOLOAD_MODE=off, attached to nothing of Engine" in caplog.text
    else:
        assert [(of.name, of.serves) for of in hooked] == [("dispatch", ("lp" if mode == "on" else SHADOW,))]


@pytest.mark.parametrize("spare", [0, 1])
def test_spare_slots_have_hooks_of_their_own(engine: None, spare: int) -> None:
    """Without the variable an engine has no other hook than before."""
    good = replace(seam("dispatch", "around", "(topk_ids, info=None, *, layer)"), serves=("dynamic",))
    own = replace(seam("Locations", "around", "(table)"), serves=("ISOLOAD_SPARE_SLOTS",))
    hooked: list[Seam] = []
    checks = {"dynamic": lambda: True, "ISOLOAD_SPARE_SLOTS": lambda: spare == 1}
    plug_in = PlugIn(
        "Engine", SGLANG, lambda _: None, checks, lambda seams, _: hooked.extend(seams), [good, own]
    )
    settings = replace(Settings.read({}), spare_slots=spare)
    assert plug_in.attach(settings) == []
    assert [of.name for of in hooked] == ["dispatch", "Locations"][: 1 + spare]


def test_spare_slots_are_sglangs_alone(engine: None) -> None:
    good = replace(seam("dispatch", "around", "(topk_ids, info=None, *, layer)"), serves=("dynamic",))
    plug_in = PlugIn("vLLM", SGLANG, lambda _: None, {}, lambda *_: None, [good])
    rule = "ISOLOAD_SPARE_SLOTS must be 0 in vLLM: experts travel within a batch in SGLang only"
    with pytest.raises(ValueError, match=rule):
        plug_in.attach(replace(Settings.read({}), spare_slots=1))


@pytest.mark.parametrize("fault", ["none", "seam", "batch"])
def test_all_hooks_or_none(monkeypatch: pytest.MonkeyPatch, engine: None, fault: str) -> None:
    """A known batch passes under the defaults, and what the environment says is in force afterwards."""
    given, started, hooked = Settings.read({"ISOLOAD_PLACER": "trivial"}), [], []
    good = [
        seam("dispatch", "around", "(topk_ids, info=None, *, layer)"),
        seam("Locations", "fields", "table"),
    ]
    found = [*good, seam("route", "call", "()")] if fault == "seam" else good
    monkeypatch.setattr("isoload.engines.seams.read_seams", lambda name: found)

    def hook(seams: list[Seam], settings: Settings) -> None:
        hooked.append(([seam.name for seam in seams], settings))

    def is_right() -> bool:
        return fault != "batch" and started == [Settings.read({})]

    plug_in = PlugIn("Engine", SGLANG, started.append, {"dispatch": is_right}, hook)
    told = plug_in.attach(given)
    if fault == "none":
        assert told == [] and hooked == [(["dispatch"], given)] and started[-1] == given
    else:
        assert len(told) == 1 and not hooked


def test_options_attach_by_themselves(monkeypatch: pytest.MonkeyPatch, engine: None) -> None:
    """A seam takes the options that it serves with it; a wrong batch takes its own; one of no option takes all."""
    given = Settings.read({})
    good = replace(seam("dispatch", "around", "(topk_ids, info=None, *, layer)"), serves=("lp", "dynamic"))
    moved = replace(seam("route", "around", "()"), serves=("lp",))
    shared, plain = (
        replace(seam("Balancer", "replace", "(rank, layer_id, weight=1.0)"), serves=("shared",)),
        [],
    )
    checks = {"lp": lambda: 1 / 0, "dynamic": lambda: True, "shared": lambda: True}

    def attach(seams: list[Seam], **wrong: bool) -> tuple[list[str], list[str]]:
        plain.clear()
        told = PlugIn("Engine", SGLANG, lambda settings: None, {**checks, **{k: lambda: False for k in wrong}}, (
            lambda hooked, settings: plain.extend(hooked)), seams)  # fmt: skip
        return told.attach_options(given)

    wrong, live = attach([good, moved, shared])
    assert live == ["dynamic", "shared"] and "made_up_engine.route cannot be found" in wrong[0]
    assert len(wrong) == 1 and wrong[0].endswith(" (needed by lp)")
    assert [(of.name, of.serves) for of in plain] == [("dispatch", ("dynamic",)), ("Balancer", ("shared",))]
    wrong, live = attach([good, moved, shared], dynamic=True)
    assert live == ["shared"] and "a known batch gives wrong slots with dynamic" in wrong[1]
    assert [of.name for of in plain] == ["Balancer"]
    assert attach([good, moved, shared], other=True)[1] == [] and not plain
    assert attach([good, shared, seam("route", "call", "()")])[1] == [] and not plain


def test_a_seam_is_found_in_its_older_home(engine: None) -> None:
    there = replace(
        seam("route.Balancer", "replace", "(rank, layer_id, weight=1.0)"), older="made_up_engine.Balancer"
    )
    assert there.located().fault() is None and there.located().name == "Balancer"
    newer = replace(seam("Balancer", "replace", "()"), older="made_up_engine.dispatch")
    assert newer.located() == newer, "the newer home is taken where both are there"
    gone = replace(there, older="made_up_engine.nowhere")
    assert "made_up_engine.route.Balancer cannot be found" in str(gone.located().fault())


@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_line_names_what_stays_without(
    monkeypatch: pytest.MonkeyPatch, engine: None, caplog: pytest.LogCaptureFixture, strict: str
) -> None:
    monkeypatch.setenv("ISOLOAD_SGLANG", "1")
    monkeypatch.setenv("ISOLOAD_STRICT", strict)
    seams = [
        replace(seam("route", "call", "()"), serves=("lp",)),
        replace(seam("Output", "fields"), serves=("eplb",)),
    ]
    plug_in = PlugIn("Engine", SGLANG, lambda settings: None, {}, lambda seams, settings: None, seams)
    if strict == "1":
        with pytest.raises(SystemExit, match=r"\(needed by lp\) \(ISOLOAD_STRICT=1 refuses to start\)"):
            plug_in.attach_or_leave()
        return
    plug_in.attach_or_leave()
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("isoload: Engine is not as isoload expects: made_up_engine.route cannot be found")
    assert line.endswith("(needed by lp). Attached to eplb")


def test_an_older_home_stands_in_for_one_that_is_gone_alone(tmp_path, monkeypatch):
    """A new home that fails as it is imported is a fault by name, not a reason to hook the old one."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "engine_old.py").write_text("def place(ids): ...\n")
    (tmp_path / "engine_broken.py").write_text("raise RuntimeError('no driver')\n")

    def moved(target):
        return Seam(target, "replace", ("(ids)",), "1", "places", older="engine_old.place")

    assert moved("engine_gone.place").located().target == "engine_old.place"
    broken = moved("engine_broken.place").located()
    assert broken.target == "engine_broken.place" and "RuntimeError: no driver" in broken.fault()


def test_a_package_that_the_engine_needs_is_the_only_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its functions is missing, because the engine cannot be imported; one line names the package."""
    folder = tmp_path / "made_up_server"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text("import cloudpickle_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    seams = [Seam(f"made_up_server.layers.{name}", "call", ("()",), "1.2", "why") for name in ("one", "two")]
    wanted = "importing made_up_server failed: No module named 'cloudpickle_that_is_missing'"
    assert missing_package(seams) == wanted
    moved = Seam("made_up_server.moved.one", "call", ("()",), "1.2", "why")
    assert missing_package([moved]) is None and str(moved.fault()).startswith(
        "made_up_server.moved.one cannot be"
    )
    plug_in = PlugIn("Made", SGLANG, lambda settings: None, {}, lambda seams, settings: None, seams)
    assert plug_in.attach(Settings.read({})) == [wanted]


@pytest.mark.parametrize("mode", ["on", "off"])
def test_absent_slots_are_refused_by_an_engine_without_their_hooks(
    monkeypatch: pytest.MonkeyPatch, engine: None, mode: str
) -> None:
    """Also without ISOLOAD_STRICT: an engine alone would take -1 for an expert. vLLM has no such hooks."""
    for name, value in {"ISOLOAD_SGLANG": "1", "ISOLOAD_RAGGED": "pages", "ISOLOAD_MODE": mode}.items():
        monkeypatch.setenv(name, value)
    assert not any(PAGES in seam.serves for seam in read_seams("vllm"))
    seams = [replace(seam("route", "call", "()"), serves=("lp",))]
    plug_in = PlugIn("Engine", SGLANG, lambda settings: None, {}, lambda seams, settings: None, seams)
    with pytest.raises(SystemExit, match="^isoload: .*ISOLOAD_RAGGED=pages"):
        plug_in.attach_or_leave()
