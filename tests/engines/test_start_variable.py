"""ISOLOAD_PLACEMENT where no vLLM is: which entry points it reaches, and SGLang's refusal."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

import isoload.engines.vllm as vllm
import isoload_engines
from isoload.engines.settings import Settings
from isoload.engines.vllm.layers import is_draft


@pytest.mark.parametrize(
    ("environ", "reached"),
    [
        ({}, False),
        ({"ISOLOAD_VLLM": "0", "ISOLOAD_PLACEMENT": " "}, False),
        ({"ISOLOAD_PLACEMENT": "plan.json"}, True),
        ({"ISOLOAD_VLLM": "1"}, True),
    ],
)
def test_the_variable_alone_attaches_to_vllm(monkeypatch, environ, reached):
    called = []
    for name in ("ISOLOAD_VLLM", "ISOLOAD_PLACEMENT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(vllm, "attach_or_leave", lambda: called.append(True))
    isoload_engines.vllm()
    assert called == [True] * reached


@pytest.mark.parametrize("switch", ["0", "1"])
def test_sglang_does_not_start_with_it(monkeypatch, switch):
    """Whether isoload attaches or not: the file would be passed over in silence."""
    monkeypatch.setenv("ISOLOAD_SGLANG", switch)
    monkeypatch.setenv("ISOLOAD_PLACEMENT", "plan.json")
    monkeypatch.setitem(sys.modules, isoload_engines.SCHEDULER, ModuleType("scheduler"))
    message = (
        "isoload: ISOLOAD_PLACEMENT=plan.json starts vLLM; SGLang starts from --init-expert-location: pass "
        "--init-expert-location FILE.json, made by isoload convert plan.json -o FILE.json --format sglang, and unset "
        "ISOLOAD_PLACEMENT"
    )
    with pytest.raises(SystemExit, match=re.escape(message)):
        isoload_engines.sglang()


def test_off_reads_no_file():
    settings = Settings.read({"ISOLOAD_PLACEMENT": "gone.json", "ISOLOAD_MODE": "off"})
    assert settings.placement == "gone.json"
    vllm.start_from_file(settings)


@pytest.mark.parametrize(
    ("args", "named", "draft"),
    [
        ((None, SimpleNamespace(runner_type="generate")), {}, False),
        ((None, SimpleNamespace(runner_type="draft")), {}, True),  # up to 0.31, which names no drafts
        ((None,), {"model_config": SimpleNamespace(runner_type="draft")}, True),
        ((None, SimpleNamespace(runner_type="generate"), "draft of it"), {}, True),
        ((None, SimpleNamespace()), {"model_name": "draft of it"}, True),
    ],
)
def test_drafts_are_known_in_every_version(args, named, draft):
    assert is_draft(args, named) == draft
