"""isoload advise: the table and the JSON of one run on the shipped trace, and what a user can get wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isoload.cli.app import app
from isoload.wording import between, two_digits
from support.documents import PLAIN, printed
from support.measured_times import times as measured
from support.measured_times import written

TRACE = str(Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz")
SETTING = ["--gpu", "h100", "--model", "gpt-oss-20b", "--ranks", "8"]
ASKED = [*SETTING, "--tokens-per-rank", "512"]
BOTH = [*SETTING, "--prefill-tokens", "512", "--decode-tokens", "64"]


def test_the_table_and_the_json_are_of_the_same_figures(tmp_path: Path) -> None:
    shown = printed(["advise", TRACE, *ASKED])
    target = tmp_path / "advice.json"
    printed(["advise", TRACE, *ASKED, "--json", str(target)])
    found = json.loads(target.read_text())
    assert f"isoload: {found['verdict']}." in " ".join(shown.split())
    assert (found["model"], found["gpu"]) == ("gpt-oss-20b", "h100") and found["kernel"] in shown
    best = found["answers"][0]
    assert between(*best["ms"]) in shown and f"{best['imbalance']:.3f}" in shown
    assert all(flag in shown for flag in found["flags"]) and len(found["answers"]) == 11
    assert "an upper limit" in shown and "an upper limit" not in printed(
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
    cells = [between(*found["steps"][of]["ms"]) for of in ("now", "best")]
    assert f"a whole step {cells[0]} {cells[1]}" in " ".join(shown.split())
    assert "in two halves" in shown and between(*found["steps"]["best"]["halved_ms"]) in shown
    assert "of a modelled step" in shown and "an upper limit" not in shown and "9 ms" in shown
    now = found["steps"]["now"]["stages"]
    assert f"waiting {between(*now['waiting'])}" in " ".join(shown.split()) and "\nrebalance" not in shown
    low, high = found["gain_share"]
    assert (low, high) == pytest.approx(
        [gain / ms for gain, ms in zip(found["gain_ms"], found["steps"]["now"]["ms"], strict=True)], rel=0.1
    )


def test_ways_to_use_memory_are_shown_for_sglang_alone(tmp_path: Path) -> None:
    target = tmp_path / "advice.json"
    shown = printed(["advise", TRACE, *ASKED, "--json", str(target)])
    ways = json.loads(target.read_text())["slots"]
    assert len(ways) == 4 and "sent" not in shown, "SGLang gathers no loads for gpt-oss"
    for way in ways:
        line = next(line for line in shown.splitlines() if line.startswith(way["label"]))
        assert (
            between(*way["ms"]) in line
            and f"{way['kv_tokens']:,}" in line
            and f"{way['imbalance']:.3f}" in line
        )
    assert "Slots: " in shown
    assert "Slots: " not in printed(["advise", TRACE, *ASKED, "--engine", "vllm"])


def test_like_for_like_has_the_verdict_at_equal_slots(tmp_path: Path) -> None:
    found = {}
    for words in ([], ["--like-for-like"]):
        target = tmp_path / f"{len(words)}.json"
        printed(["advise", TRACE, *ASKED, *words, "--json", str(target)])
        found[bool(words)] = json.loads(target.read_text())
    assert found[True]["gain_ms_by_slots"] == found[False]["gain_ms_by_slots"]
    assert found[False]["gain_ms"] == found[False]["gain_ms_by_slots"]["chosen"]
    assert found[True]["gain_ms"] == found[True]["gain_ms_by_slots"]["equal"]


def test_long_paths_of_a_trace_are_a_word_in_the_command(tmp_path: Path) -> None:
    folder = tmp_path / ("a-folder-with-a-long-name-" * 3)
    folder.mkdir()
    copied = shutil.copy(TRACE, folder / "trace.npz")
    shown = printed(["advise", str(copied), *ASKED])
    assert (
        "isoload place TRACE --model gpt-oss-20b -o" in shown
        and "TRACE is the files of the trace" in " ".join(shown.split())
    )
    assert str(folder) not in shown


@pytest.mark.parametrize(
    ("kernel", "words", "warned"),
    [
        ("isoload", [], "the times of dispatch and combine are those of isoload's own exchange"),
        ("deep_ep", [], None),
        ("deep_ep", ["--phase", "decode"], "The commands start DeepEP's low-latency mode for decode"),
        ("deep_ep", ["--phase", "decode", "--engine", "vllm"], "DeepEP's low-latency mode for decode"),
    ],
)
def test_dispatch_that_was_timed_otherwise_than_it_runs_is_named(
    tmp_path: Path, kernel: str, words: list[str], warned: str | None
) -> None:
    """The printed command starts DeepEP, for decode in its low-latency mode."""
    times = written(tmp_path / "times.json", exchange=measured().to_json()["exchange"] | {"kernel": kernel})
    config = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "torch_dtype": "bfloat16"}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    words = [*words, "--times", str(times), "--model", str(tmp_path / "tiny.json"), "--ranks", "4"]
    shown = printed(["advise", "--skew", "zipf:2", *words, "--tokens-per-rank", "4096"])
    assert "--moe-a2a-backend deepep" in shown or "--all2all-backend deepep_low_latency" in shown
    text = " ".join(shown.split())
    for sentence in ("those of isoload's own exchange", "DeepEP's low-latency mode for decode"):
        assert (sentence in text) == (warned is not None and sentence in warned), text


def test_a_guess_says_that_it_is_one() -> None:
    shown = printed(["advise", "--skew", "zipf:1.2", *ASKED, "--wide"])
    assert "No trace was given" in shown and "a layer" in shown


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_of_both_phases_has_one_verdict(tmp_path: Path, engine: str) -> None:
    """The verdict is about the mean step of the candidates, whose placements are the same in both phases."""
    target = tmp_path / "advice.json"
    words = ["advise", TRACE, *BOTH, "--engine", engine, "--prefill-share", "0.25"]
    shown = printed(words)
    assert f"Wrote {target}." in printed([*words, "--json", str(target)])
    found = json.loads(target.read_text())
    phases = found["by_phase"]
    assert [(name, of["tokens_per_rank"], of["share_of_steps"]) for name, of in phases.items()] == [
        ("prefill", 512, 0.25),
        ("decode", 64, 0.75),
    ]
    for mean, prefill, decode in zip(
        found["answers"], *(of["answers"] for of in phases.values()), strict=True
    ):
        assert mean["candidate"] == prefill["candidate"] == decode["candidate"]
        expected = [0.25 * of + 0.75 * other for of, other in zip(prefill["ms"], decode["ms"], strict=True)]
        assert mean["ms"] == pytest.approx(expected)
    means = [sum(of["ms"]) for of in found["answers"]]
    assert means == sorted(means)
    text = " ".join(shown.split())
    assert shown.count("\nisoload: ") == 1 and f"isoload: {found['verdict']}." in text
    assert "a mean step" in text and "a step of prefill and" in text and "a step of decode." in text
    best = found["answers"][0]
    cells = [between(*of["answers"][0]["ms"]) for of in phases.values()]
    assert " ".join([*cells, between(*best["ms"])]) in text
    assert ("deepep_low_latency" in shown) is False
    assert max(len(line) for line in shown.split("Without isoload")[0].splitlines()[5:]) <= 80


@pytest.mark.slow
def test_the_page_of_both_phases_shows_each_point_once(tmp_path: Path) -> None:
    """The milliseconds of the chart by tokens, at the advised tokens, are those of the table."""
    figures, page = tmp_path / "advice.json", tmp_path / "page.html"
    shown = printed(
        ["advise", TRACE, *BOTH, "--prefill-share", "0.25", "--json", str(figures), "--html", str(page)]
    )
    assert f"Wrote {figures} and {page}." in shown
    text, found = page.read_text(), json.loads(figures.read_text())
    for name, of in found["by_phase"].items():
        assert f"A step on its ranks, {name}" in text and f"Loads by rank, {name}" in text
        low, high = of["answers"][0]["saved_ms"]
        tokens = of["tokens_per_rank"]
        ends = f'<td data-of="ms saved, from">{two_digits(low)}</td><td data-of="to">{two_digits(high)}</td>'
        assert f"<th scope=row>{tokens}</th>{ends}" in text, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--tokens-per-rank must be given, or --prefill-tokens and --decode-tokens"),
        (
            ["--prefill-tokens", "9", "--decode-tokens", "9"],
            "--prefill-share must be given with --prefill-tokens",
        ),
        (
            ["--prefill-tokens", "9", "--prefill-share", "0.1"],
            "--prefill-share must be given with --prefill-tokens",
        ),
        (
            ["--prefill-tokens", "9", "--phase", "prefill"],
            "--tokens-per-rank and phase must be given without",
        ),
        (
            ["--decode-tokens", "9", "--tokens-per-rank", "9"],
            "--tokens-per-rank and phase must be given without",
        ),
        (
            [*BOTH[6:], "--prefill-share", "0.1", "--step-ms", "9"],
            "--step-ms and --dense-ms must be given with one phase",
        ),
    ],
)
def test_tokens_that_do_not_go_together_are_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["advise", TRACE, *SETTING, *words], env=PLAIN)
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "skew must be given without a trace, and only then, got None and None"),
        ([TRACE, "--skew", "zipf:1"], "skew must be given without a trace, and only then, got 'zipf:1'"),
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
