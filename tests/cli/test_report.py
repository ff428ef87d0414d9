"""isoload report: a recorded folder as tables, JSON, page and trace, and what a user can get wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.analysis.rank_loads import read_recorded
from isoload.analysis.server import phases
from isoload.cli.app import app
from isoload.wording import between
from support.documents import PLAIN, printed
from support.measured_times import step, times
from support.pages import missing, read_page
from support.recorded_runs import save_run

EXPERTS, K, RANKS, LAYERS = 32, 4, 8, 3
MODEL = ["--gpu", "h100", "--model", "gpt-oss-20b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four passes of decode and three of prefill, of eight ranks with tokens of their own."""
    draws, target = np.random.default_rng(1), tmp_path_factory.mktemp("recorded")
    skew = np.log(draws.random((LAYERS, EXPERTS)) ** 3)
    names = ("decode", "prefill", "decode", "decode", "prefill", "decode", "prefill")
    passes = []
    for name in names:
        noise = draws.gumbel(size=(RANKS, 40 if name == "prefill" else 8, LAYERS, EXPERTS))
        passes.append(list(np.argsort(-(skew + noise), axis=-1)[..., :K].astype(np.int32)))
    placement = isoload.place(np.exp(skew), isoload.Topology(RANKS), 5)
    save_run(target, placement, passes, names, K)
    return target


def test_the_table_the_json_and_the_record_are_alike(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    shown = printed(["report", str(folder)])
    printed(["report", str(folder), "--json", str(target)])
    found, held = json.loads(target.read_text()), phases(read_recorded(folder))
    assert [row["phase"] for row in found["phases"]] == ["decode", "prefill"] and found["advice"] is None
    for row, of in zip(found["phases"], held, strict=True):
        assert row["routed"] == of.quantiles(of.routed) and row["planned_by_layer"] == of.planned.tolist()
        cells = [f"{of.quantiles(x)[key]:.3f}" for x in (of.routed, of.planned) for key in ("mean", "worst")]
        (line,) = [line for line in shown.splitlines() if line.startswith(of.name)]
        assert all(cell in line.split() for cell in cells) and line.split()[1] == str(len(of.batches))
    assert "saved" not in shown.split("Rank loads")[0]
    assert max(map(len, shown.splitlines())) <= 80


def test_with_a_gpu_it_is_advise_on_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    """The joined trace, given to advise with the same tokens, gets the same advice."""
    target, trace, other = tmp_path / "report.json", tmp_path / "joined.npz", tmp_path / "advice.json"
    words = ["report", str(folder), *MODEL, "--trace", str(trace), "--json", str(target)]
    words += ["--phase", "decode"]
    shown = printed([word for word in words if word not in ("--trace", str(trace), "--json", str(target))])
    printed(words)
    found, joined = json.loads(target.read_text()), isoload.read_trace(trace)
    assert np.array_equal(joined.counts, read_recorded(folder).trace.counts) and joined.cluster is not None
    decode = [i for i, phase in enumerate(joined.cluster) if phase == "decode"]
    alone = tmp_path / "decode.npz"
    isoload.traces.write_trace(isoload.traces.Trace("decode", EXPERTS, K, joined.counts[decode]), alone)
    asked = ["--ranks", str(RANKS), "--tokens-per-rank", "8", "--phase", "decode"]
    printed(["advise", str(alone), *MODEL, *asked, "--json", str(other)])
    advice = json.loads(other.read_text())
    assert found["advice"]["answers"] == advice["answers"] and found["advice"]["verdict"] == advice["verdict"]
    low, high = found["phases"][0]["saved_ms"]
    text = " ".join(shown.split())
    assert between(low, high) in shown and f"isoload: {advice['verdict']}." in text
    assert "The advice on decode is from 4 passes." in text


def test_a_record_of_both_phases_has_one_verdict(folder: Path, tmp_path: Path) -> None:
    """Of seven recorded passes three are prefill; placements are made of the first halves of both."""
    target = tmp_path / "report.json"
    text = " ".join(printed(["report", str(folder), *MODEL]).split())
    printed(["report", str(folder), *MODEL, "--json", str(target)])
    advice = json.loads(target.read_text())["advice"]
    shares = {name: of["share_of_steps"] for name, of in advice["by_phase"].items()}
    assert shares == {"prefill": 3 / 7, "decode": 4 / 7}
    assert "a mean step" in text and text.count(f"isoload: {advice['verdict']}.") == 1
    assert "prefill: 40 tokens a rank in 42.9 % of the steps" in text


@pytest.mark.slow
def test_the_page_begins_with_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    target, figures = tmp_path / "page.html", tmp_path / "report.json"
    printed(["report", str(folder), *MODEL, "--html", str(target), "--json", str(figures)])
    text = target.read_text()
    assert missing(json.loads(figures.read_text()), read_page(text)) == []
    assert text.index("As recorded") < text.index("The candidates") and "Imbalance by layer, prefill" in text
    words = ["--html", str(target), "--json", str(figures)]
    printed(["report", str(folder), *MODEL, *words])  # both are known again


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h100"], "gpu must come with model, got h100 and None"),
        (["--html", "x.html"], "html must come with --gpu and --model, got neither"),
        (["--phase", "train"], "phase must be one that was recorded, decode or prefill, got 'train'"),
        (["--trace", "/"], "trace must be a new file, or --force be given, got '/'"),
        (["--gpu", "v100", "--model", "gpt-oss-20b"], "gpu must be one of"),
        (["--gpu", "h100", "--model", "qwen3-30b"], "must have the trace's 32 experts and top-4"),
    ],
)
def test_what_cannot_be_is_one_line(folder: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["report", str(folder), *words], env=PLAIN)
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.output


def test_times_of_ones_own_stand_for_a_gpu(folder: Path, tmp_path: Path) -> None:
    """The experts' shape is the model's; eight ranks were measured."""
    experts = replace(times().experts, hidden=2880, intermediate=2880, dtype="bfloat16")
    measured = times(experts=experts, ranks=8, dispatch=step("dispatch", 8), combine=step("combine", 8))
    path, target = tmp_path / "times.json", tmp_path / "report.json"
    path.write_text(json.dumps(measured.to_json() | {"speeds": [1.0] * 8}))
    words = ["report", str(folder), "--times", str(path), "--model", "gpt-oss-20b", "--dtype", "bfloat16"]
    printed([*words, "--json", str(target)])
    report = json.loads(target.read_text())
    assert all(row["saved_ms"] is not None for row in report["phases"]) and report["advice"] is not None
    refused = CliRunner().invoke(app, [*words, "--gpu", "h100"], env=PLAIN)
    assert "gpu must be left out with times, which are of your GPUs" in refused.stderr
