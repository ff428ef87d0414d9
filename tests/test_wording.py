"""A refused name comes with the choice that is spelled most like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.analysis.models import find_model, layer_time
from isoload.cli.app import app
from isoload.engines.settings import Settings
from isoload.placers import parse_placer
from isoload.policies import make_policy, parse_policy
from isoload.times.experts import read, select
from isoload.traces.record import with_top_k
from isoload.wording import nearest, not_one_of, saving, two_digits
from support.documents import PLAIN

SHIPPED = Path(__file__).parent.parent / "examples" / "traces" / "gptoss20b_decode.npz"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a policy": (lambda: make_policy("exat"), "exact"),
    "a policy's case": (lambda: make_policy("Exact"), "exact"),
    "a policy in text": (lambda: parse_policy("wterfill:routed=exact"), "waterfill"),
    "a policy's option": (lambda: parse_policy("llep:capactiy=1"), "capacity"),
    "an option's value": (lambda: parse_policy("lp_sampled:method=afine"), "affine"),
    "a placer": (lambda: isoload.place(np.ones((1, 4)), 2, placer="ebpl"), "eplb"),
    "a placer's option": (lambda: parse_placer("scenario:mvoes=3"), "moves"),
    "a format": (lambda: isoload.placement.files.check_format("sg-lang", "p.json"), "sglang"),
    "a model": (lambda: find_model("deepseek-v33"), "deepseek-v3"),
    "a model's K": (lambda: with_top_k(isoload.read_trace(SHIPPED), "deepsek-v3"), "deepseek-v3"),
    "a GPU": (lambda: layer_time("h20", "sglang", "decode", find_model("deepseek-v3"), 8), "h200"),
    "an engine": (
        lambda: layer_time("h200", "sglan", "decode", find_model("deepseek-v3"), 8),
        "sglang",
    ),
    "a GPU of the tables": (lambda: select(read("experts"), gpu="h20"), "h200"),
    "a variable": (lambda: Settings.read({"ISOLOAD_MODE": "shadw"}), "shadow"),
    "a variable's policy": (lambda: Settings.read({"ISOLOAD_POLICY": "exat"}), "exact"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_typo_names_what_was_meant(given: str) -> None:
    refused, meant = REFUSED[given]
    with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
        refused()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["repaly"], "'replay'"),
        (["replay", str(SHIPPED), "--rnaks", "8"], "--ranks"),
        (["replay", str(SHIPPED), "--policies", "none,exat"], "did you mean exact?"),
        (["replay", str(SHIPPED), "--calibrate", "firsthalf"], "did you mean first-half?"),
        (["place", str(SHIPPED), "-o", "p.json", "--ranks", "8", "--placer", "epbl"], "did you mean eplb?"),
    ],
)
def test_the_command_names_what_was_meant(words: list[str], meant: str) -> None:
    done = CliRunner().invoke(app, words, env=PLAIN | {"COLUMNS": "200"})
    assert done.exit_code == 2 and meant in done.output.replace("Did you mean", "did you mean")


def test_what_is_like_nothing_is_refused_as_before() -> None:
    assert nearest("zzz", ["exact"]) == ""
    assert not_one_of("policy", ["a", "b"], 7, " or c") == "policy must be one of a, b or c, got 7"
    assert len(not_one_of("policy", ["a"], "x" * 1000)) < 150
    assert json.dumps(not_one_of("policy", ["a"], "\x1b[31m")).count("\\u001b") == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0028, "0"),
        (0.28, "0.28"),
        (5.94, "5.9"),
        (9.96, "10"),
        (16.24, "16"),
        (104.4, "100"),
        (-0.277, "-0.28"),
    ],
)
def test_a_figure_of_a_model_has_two_digits(value: float, text: str) -> None:
    assert two_digits(value) == text


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((16.24, 17.42), "saves 16 to 17 ms"),
        ((0.001, 0.2), "saves up to 0.20 ms"),
        ((-1.8, -1.2), "takes 1.2 to 1.8 ms longer"),
        ((-0.28, -0.001), "takes up to 0.28 ms longer"),
        ((-0.28, 0.004), "takes up to 0.28 ms longer"),
        ((-0.28, 0.5), "saves up to 0.50 ms or takes up to 0.28 ms longer"),
        ((-0.001, 0.004), "changes less than 0.01 ms"),
        ((3.0, 3.0), "saves 3.0 ms"),
    ],
)
def test_a_range_of_savings_is_a_sentence(ends: tuple[float, float], text: str) -> None:
    assert saving(*ends, "ms") == text
