"""isoload advise: the table and the JSON of one run on the shipped trace, and what a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isoload.cli.app import app
from support.documents import PLAIN, printed

TRACE = str(Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz")
ASKED = ["--gpu", "h100", "--model", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "512"]


def test_the_table_and_the_json_are_of_the_same_figures(tmp_path: Path) -> None:
    shown = printed(["advise", TRACE, *ASKED])
    target = tmp_path / "advice.json"
    printed(["advise", TRACE, *ASKED, "--json", str(target)])
    found = json.loads(target.read_text())
    assert f"isoload: {found['verdict']}." in " ".join(shown.split())
    assert (found["model"], found["gpu"]) == ("gpt-oss-20b", "h100") and found["kernel"] in shown
    best = found["answers"][0]
    assert f"{best['ms'][0]:.2f} .. {best['ms'][1]:.2f}" in shown and f"{best['imbalance']:.3f}" in shown
    assert all(flag in shown for flag in found["flags"]) and len(found["answers"]) == 14
    assert "an upper end" in shown and "an upper end" not in printed(
        ["advise", TRACE, *ASKED, "--step-ms", "40"]
    )
    assert all(len(line) <= 80 for line in shown.split("Without isoload")[0].splitlines()[3:])
    printed(["advise", TRACE, *ASKED, "--json", str(target)])  # it is recognised as advise's


@pytest.mark.slow
def test_a_whole_step_is_shown_by_its_stages(tmp_path: Path) -> None:
    target, words = tmp_path / "advice.json", ["advise", TRACE, *ASKED, "--dense-ms", "9"]
    shown = printed(words)
    printed([*words, "--json", str(target)])
    found = json.loads(target.read_text())
    cells = [" .. ".join(f"{ms:.2f}" for ms in found["steps"][of]["ms"]) for of in ("now", "best")]
    assert f"a whole step   {cells[0]} {cells[1]}" in shown
    assert "in two halves" in shown and f"{found['steps']['best']['halved_ms'][1]:.2f}" in shown
    assert "of a modelled step" in shown and "an upper end" not in shown and "9 ms" in shown
    now = found["steps"]["now"]["stages"]
    assert f"waiting {now['waiting'][0]:.2f}" in " ".join(shown.split()) and "\nrebalance" not in shown
    low, high = found["gain_share"]
    assert (low, high) == pytest.approx(
        [gain / ms for gain, ms in zip(found["gain_ms"], found["steps"]["now"]["ms"], strict=True)], rel=0.1
    )


def test_a_guess_says_that_it_is_one() -> None:
    shown = printed(["advise", "--skew", "zipf:1.2", *ASKED, "--wide"])
    assert "No trace was given" in shown and "a layer" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "skew must be given in place of a trace, got None and None"),
        ([TRACE, "--skew", "zipf:1"], "skew must be given in place of a trace, got 'zipf:1'"),
        ([TRACE, "--step-ms", "0"], "--step-ms must be in 0.001..10000000, got 0.0"),
        (
            [TRACE, "--step-ms", "40", "--dense-ms", "9"],
            "--dense-ms must be above 0, and in place of --step-ms, got 9 and 40",
        ),
        (
            [TRACE, "--rebalance-seconds", "1"],
            "--rebalance-seconds must be at least 0 and come with every, got 1 and 0",
        ),
        ([TRACE, "--gpu", "v100"], "gpu must be one of"),
        (
            [TRACE, "--model", "qwen3-30b"],
            "model must have the trace's 32 experts and top-4, qwen3-30b has 128",
        ),
        ([TRACE, "--dtype", "int3"], "dtype must be one of"),
        ([TRACE, "--kernel", "magic"], "kernel must be one of"),
        ([TRACE, "--phase", "train"], "phase must be one of prefill, decode, got 'train'"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["advise", *ASKED, *words], env=PLAIN)
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.output
