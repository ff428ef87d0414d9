"""The plug-ins' environment variables: read, refused, documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.engines.settings import (
    COMMON,
    MODE,
    PHASES,
    REPORT,
    SGLANG,
    VLLM,
    Settings,
    Variable,
    is_on,
)
from isoload.policies import make_policy

ROOT = Path(__file__).parents[2]


def test_defaults() -> None:
    settings = Settings.read({})
    assert settings == Settings(False, None, None, "eplb", 0.0, False, 60.0, "on", None, 64, None)
    for shared, name in ((False, "exact"), (True, "joint")):
        assert settings.policies_for(shared) == both(isoload.POLICIES[name](tolerance=0.001))


def test_the_default_plan_is_certified_within_a_thousandth() -> None:
    """32 ranks, 16 replicas: the default ends earlier than the exact plan, and its peak is at most 1.001 bounds."""
    draw = np.random.default_rng(3)
    loads = torch.from_numpy(draw.multinomial(2**19, draw.dirichlet(np.full(128, 0.6)), 16)).int()
    placement = isoload.place(loads.double(), isoload.Topology(16), 12)
    policy = Settings.read({}).policies_for(shared=False)["decode"]
    exact, default = (isoload.balancing.planning.plan_layers(loads, placement, p) for p in ("exact", policy))
    assert torch.equal(exact.peak, exact.bound) and (default.peak > default.bound).any()
    assert (default.peak <= default.bound + default.bound // 1000).all()
    assert (default.bound <= exact.peak).all(), "a bound for every split"


def both(of: Any) -> dict[str, Any]:
    return dict.fromkeys(PHASES, of)


def test_empty_is_unset() -> None:
    names = [variable.name for variable in COMMON]
    assert Settings.read(dict.fromkeys(names, "")) == Settings.read({})


def test_values() -> None:
    given = {
        "ISOLOAD_STRICT": "1", "ISOLOAD_POLICY": "exact:tolerance=0.01",
        "ISOLOAD_LOADS": "own", "ISOLOAD_PLACER": "trivial", "ISOLOAD_REPORT_SECONDS": "2.5",
        "ISOLOAD_CHECK_WEIGHTS": "1", "ISOLOAD_STALLED_SECONDS": "5",
    }  # fmt: skip
    settings = Settings.read(given)
    assert settings == Settings(True, "exact:tolerance=0.01", "own", "trivial", 2.5, True, 5.0)
    for shared in (False, True):  # a policy of routed experts leaves shared ones at home
        assert settings.policies_for(shared) == both(isoload.POLICIES["exact"](tolerance=0.01))


def test_a_policy_for_each_phase() -> None:
    text = "decode=exact_active, prefill=exact:tolerance=0.01:budget=9"
    settings = Settings.read({"ISOLOAD_POLICY": text})
    exact = isoload.POLICIES["exact"](tolerance=0.01, budget=9)
    assert settings.policies_for(False) == {"prefill": exact, "decode": isoload.POLICIES["exact_active"]()}
    assert settings.phased and not settings.places_shared
    assert not Settings.read({"ISOLOAD_POLICY": "prefill=lp,decode=lp"}).phased


def test_a_phase_of_shared_experts_needs_some() -> None:
    settings = Settings.read({"ISOLOAD_POLICY": "prefill=joint,decode=exact_active"})
    assert settings.places_shared
    assert [of.name for of in settings.policies_for(shared=True).values()] == ["joint", "exact_active"]
    with pytest.raises(ValueError, match="without --enable-waterfill\\), got 'prefill=joint,decode=exact_"):
        settings.policies_for(shared=False)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOLOAD_STRICT", "1")
    assert Settings.read().strict


@pytest.mark.parametrize("switch", [SGLANG, VLLM], ids=lambda switch: switch.name)
def test_switches(switch: Variable) -> None:
    assert [is_on(switch, {switch.name: text}) for text in ("", "0", "1")] == [False, False, True]
    assert not is_on(switch, {})
    with pytest.raises(ValueError, match=f"{switch.name} must be 0 or 1, got 'true'"):
        is_on(switch, {switch.name: "true"})


BAD = {
    ("ISOLOAD_STRICT", "2"): "ISOLOAD_STRICT must be 0 or 1, got '2'",
    ("ISOLOAD_POLICY", "best"): "ISOLOAD_POLICY: policy must be one of",
    ("ISOLOAD_POLICY", "exact:speed=3"): "ISOLOAD_POLICY: option must be one of",
    (
        "ISOLOAD_POLICY",
        "llep",
    ): "ISOLOAD_POLICY must not borrow weights without ISOLOAD_SPARE_SLOTS, got 'llep'",
    ("ISOLOAD_POLICY", "spill_cost"): "ISOLOAD_POLICY must not borrow weights",
    **{
        ("ISOLOAD_POLICY", text): f"ISOLOAD_POLICY must name each of prefill and decode once, got '{text}'"
        for text in (
            "prefill=exact",
            "decode=exact,train=lp",
            "prefill=exact,prefill=lp,decode=lp",
            "prefill=exact,decode=lp,",
            "prefill=exact,lp",
        )
    },
    ("ISOLOAD_POLICY", "prefill=exact,decode=best"): "ISOLOAD_POLICY: policy must be one of",
    ("ISOLOAD_POLICY", "prefill=,decode=exact"): "ISOLOAD_POLICY: policy must be one of",
    ("ISOLOAD_POLICY", "prefill=llep,decode=exact"): "ISOLOAD_POLICY must not borrow weights",
    ("ISOLOAD_LOADS", "all"): "ISOLOAD_LOADS must be one of gathered, own, node, got 'all'",
    ("ISOLOAD_LOADS", "last"): "ISOLOAD_LOADS=last was removed: use own",
    ("ISOLOAD_PLACER", "best"): "ISOLOAD_PLACER: placer must be one of",
    (
        "ISOLOAD_PLACER",
        "grace",
    ): "ISOLOAD_PLACER must place by counts, because an engine records no per-token",
    **{
        ("ISOLOAD_PLACER", text): "ISOLOAD_PLACER must fill all slots of the engine, "
        for text in ("craft", "craft:replicas=4", "scenario:replicas=knee")
    },
    **{
        (
            "ISOLOAD_POLICY",
            text,
        ): "ISOLOAD_POLICY must plan on the engine's device, this policy computes on the CPU"
        for text in ("lp_sampled:method=affine", "prefill=lp_sampled:method=affine,decode=lp")
    },
    ("ISOLOAD_REPORT_SECONDS", "-1"): "ISOLOAD_REPORT_SECONDS must be a number of at least 0, got '-1'",
    ("ISOLOAD_REPORT_SECONDS", "often"): "ISOLOAD_REPORT_SECONDS must be a number of at least 0, got 'often'",
    ("ISOLOAD_REPORT_SECONDS", "inf"): "ISOLOAD_REPORT_SECONDS must be a number of at least 0, got 'inf'",
    ("ISOLOAD_CHECK_WEIGHTS", "yes"): "ISOLOAD_CHECK_WEIGHTS must be 0 or 1, got 'yes'",
    ("ISOLOAD_STALLED_SECONDS", "-1"): "ISOLOAD_STALLED_SECONDS must be a number of at least 0, got '-1'",
    ("ISOLOAD_REPORT_SECONDS", "nan"): "ISOLOAD_REPORT_SECONDS must be a number of at least 0, got 'nan'",
    ("ISOLOAD_MODE", "dry"): "ISOLOAD_MODE must be one of on, off, shadow, got 'dry'",
    ("ISOLOAD_MODE", "shadow"): (
        "ISOLOAD_MODE=shadow must come with ISOLOAD_RECORD or ISOLOAD_REPORT_SECONDS, got neither"
    ),
    ("ISOLOAD_RECORD", "/"): "ISOLOAD_RECORD must come with ISOLOAD_MODE=shadow, got 'on'",
    ("ISOLOAD_RECORD_EVERY", "0"): "ISOLOAD_RECORD_EVERY must be a whole number of at least 1, got '0'",
    **{
        (
            "ISOLOAD_SPARE_SLOTS",
            text,
        ): f"ISOLOAD_SPARE_SLOTS must be a whole number of at least 0, got '{text}'"
        for text in ("-1", "two", "1.5", "99999")
    },
    ("ISOLOAD_RECORD_EVERY", "2.5"): "ISOLOAD_RECORD_EVERY must be a whole number of at least 1, got '2.5'",
}


def test_shadow_mode_is_of_exact_and_writes_where_a_folder_is(tmp_path: Path) -> None:
    shadow = {"ISOLOAD_MODE": "shadow", "ISOLOAD_RECORD": str(tmp_path)}
    settings = Settings.read(shadow | {"ISOLOAD_RECORD_EVERY": "8"})
    assert (settings.mode, settings.record, settings.record_every) == ("shadow", str(tmp_path), 8)
    with pytest.raises(ValueError, match="ISOLOAD_RECORD must be an existing folder, got '/gone'"):
        Settings.read(shadow | {"ISOLOAD_RECORD": "/gone"})
    with pytest.raises(ValueError, match="ISOLOAD_POLICY must be exact if ISOLOAD_MODE is shadow, got 'lp'"):
        Settings.read(shadow | {"ISOLOAD_POLICY": "lp"})
    with pytest.raises(ValueError, match="ISOLOAD_SWITCH must come with ISOLOAD_MODE=on, got 'shadow'"):
        Settings.read(shadow | {"ISOLOAD_SWITCH": "file"})
    with pytest.raises(ValueError, match="ISOLOAD_POLICY must be exact if ISOLOAD_SWITCH is given, got 'lp'"):
        Settings.read({"ISOLOAD_SWITCH": "file", "ISOLOAD_POLICY": "lp"})
    for given in (shadow, {"ISOLOAD_SWITCH": "file"}):
        with pytest.raises(ValueError, match="ISOLOAD_POLICY must be exact if .*, got 'prefill=exact,"):
            Settings.read(given | {"ISOLOAD_POLICY": "prefill=exact,decode=exact_active"})
    with pytest.raises(ValueError, match="ISOLOAD_RECORD must come with ISOLOAD_MODE=shadow, got 'on'"):
        Settings.read({"ISOLOAD_SWITCH": "file", "ISOLOAD_RECORD": str(tmp_path)})


TRAVELS = "prefill=llep:within=node:refill_above=1.1,decode=exact"


def test_spare_slots_come_with_a_policy_that_fills_them_in_prefill() -> None:
    spare = {"ISOLOAD_SPARE_SLOTS": "2", "ISOLOAD_POLICY": TRAVELS}
    assert Settings.read(spare).spare_slots == 2
    assert Settings.read(spare | {"ISOLOAD_SWITCH": "file", "ISOLOAD_LOADS": "gathered"}).switch == "file"
    for policy in (
        "exact", "llep:within=node", "prefill=llep,decode=exact", "prefill=libra,decode=exact",
        "prefill=exact,decode=llep:within=node", "prefill=llep:within=all,decode=exact",
    ):  # fmt: skip
        rule = "ISOLOAD_SPARE_SLOTS must come with a policy that borrows within the node in prefill alone"
        with pytest.raises(ValueError, match=f"{rule} .*, got '{policy}'"):
            Settings.read(spare | {"ISOLOAD_POLICY": policy})
    with pytest.raises(ValueError, match="borrows within the node in prefill alone .*, got None"):
        Settings.read({"ISOLOAD_SPARE_SLOTS": "1"})
    for loads in ("own", "node"):
        with pytest.raises(ValueError, match=f"must come with ISOLOAD_LOADS=gathered, .*, got '{loads}'"):
            Settings.read(spare | {"ISOLOAD_LOADS": loads})
    with pytest.raises(
        ValueError, match="cannot be combined with ISOLOAD_TIMES, got '/some': unset one of them"
    ):
        Settings.read(spare | {"ISOLOAD_TIMES": "/some"})
    shadow = spare | {"ISOLOAD_MODE": "shadow", "ISOLOAD_REPORT_SECONDS": "1"}
    assert Settings.read(shadow).policies_for(shared=False)["prefill"].borrows
    with pytest.raises(
        ValueError, match="ISOLOAD_POLICY must be exact if ISOLOAD_MODE is shadow, got 'prefill"
    ):  # fmt: skip
        Settings.read(shadow | {"ISOLOAD_POLICY": TRAVELS.replace("decode=exact", "decode=exact_active")})


def test_llep_has_defaults_of_its_own_in_engines() -> None:
    """The documented policy moves experts for small imbalances, too; options that are named count."""
    for more, want in (("", {}), (":threshold=1.2:min_chunk=256", {"threshold": 1.2, "min_chunk": 256})):
        policy = f"prefill=llep:within=node:refill_above=1.1{more},decode=exact"
        settings = Settings.read({"ISOLOAD_SPARE_SLOTS": "1", "ISOLOAD_POLICY": policy})
        options = {"threshold": 1.0, "min_chunk": 128, "within": "node", "refill_above": 1.1} | want
        assert settings.policies_for(shared=False)["prefill"] == make_policy("llep", options)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refuses(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=re.escape(BAD[name, value])):
        Settings.read({name: value})


@pytest.mark.parametrize("loads", ["own", "node"])
@pytest.mark.parametrize(
    "policy",
    ["dynamic", "lp", "joint", "prefill=exact,decode=lp", "prefill=lp,decode=exact"],
)
def test_a_policy_of_all_counts_needs_them(loads: str, policy: str) -> None:
    """Set by the variable or by the argument."""
    given = {"ISOLOAD_POLICY": policy}
    message = f"ISOLOAD_POLICY must be exact if ISOLOAD_LOADS is {loads}: .*, got '{policy}'"
    with pytest.raises(ValueError, match=message):
        Settings.read(given | {"ISOLOAD_LOADS": loads})
    with pytest.raises(ValueError, match=message):
        Settings.read(given).loads_for(loads)
    assert Settings.read(given | {"ISOLOAD_LOADS": "gathered"}).loads_for(loads) == "gathered"
    assert Settings.read({}).loads_for(loads) == loads


@pytest.mark.parametrize("policy", ["joint", "waterfill", "shared_local", "waterfill_sampled"])
def test_a_policy_of_shared_experts_needs_some(policy: str) -> None:
    settings = Settings.read({"ISOLOAD_POLICY": policy})
    assert settings.policies_for(shared=True)["decode"].name == policy
    with pytest.raises(ValueError, match=f"without --enable-waterfill\\), got '{policy}'"):
        settings.policies_for(shared=False)


@pytest.mark.parametrize(("page", "switch"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_the_first_variables_are_on_the_page_of_an_engine(page: str, switch: Variable) -> None:
    """The pages have these variables with their defaults, in the same words, and link to environment.md for all."""
    texts = [(ROOT / "docs" / f"{name}.md").read_text() for name in (page, "sglang")]
    rows, others = (
        re.findall(r"^\| `(ISOLOAD_\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", text, re.M) for text in texts
    )
    assert [row[::2] for row in rows] == [(v.name, f"`{v.default}`") for v in (switch, MODE, REPORT)]
    assert rows[1:] == others[1:] and "(environment.md)" in texts[0]


RAGGED_REFUSED = {
    "ISOLOAD_RAGGED must be pages or empty, got 'yes'": {"ISOLOAD_RAGGED": "yes"},
    "ISOLOAD_SPARE_SLOTS must be unset with ISOLOAD_RAGGED=pages, whose slots need memory in every layer, got '1'": {
        "ISOLOAD_SPARE_SLOTS": "1",
        "ISOLOAD_POLICY": "prefill=llep:within=node,decode=exact",
    },
    "ISOLOAD_REBALANCE must be unset with ISOLOAD_RAGGED=pages, which compares maps of the same slots, got": {
        "ISOLOAD_REBALANCE": "gain_ms=1"
    },
    "ISOLOAD_MODE must be on or shadow with ISOLOAD_RAGGED=pages, got 'off'": {"ISOLOAD_MODE": "off"},
    "ISOLOAD_PLACER must be a placer that keeps slots absent with ISOLOAD_RAGGED=pages, got 'trivial'": {
        "ISOLOAD_PLACER": "trivial"
    },
}


@pytest.mark.parametrize("message", RAGGED_REFUSED)
def test_what_absent_slots_cannot_be_combined_with(message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Settings.read({"ISOLOAD_RAGGED": "pages"} | RAGGED_REFUSED[message])


def test_a_budget_of_replicas_needs_absent_slots() -> None:
    assert (
        Settings.read({"ISOLOAD_RAGGED": "pages", "ISOLOAD_PLACER": "scenario:replicas=8"}).ragged == "pages"
    )
    for placer in ("scenario:replicas=8", "eplb:replicas=8", "craft"):
        with pytest.raises(ValueError, match="ISOLOAD_PLACER must fill all slots of the engine"):
            Settings.read({"ISOLOAD_PLACER": placer})
