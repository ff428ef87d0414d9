"""``isoload measure`` and ``advise --times``: the file, the printed constants, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from isoload.analysis import measuring
from isoload.cli.app import app
from isoload.times import load
from support.documents import PLAIN

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
}
TINY = ["--model", "tiny.json", "--dtype", "float32"]


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env=PLAIN)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measuring, "COPIES", (1, 4, 16))
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_file_is_written_and_taken_in_place_of_a_gpu() -> None:
    done = run("measure", "-o", "mine.json", *TINY)
    assert done.exit_code == 0 and done.stdout.endswith("Wrote mine.json.\n"), done.output
    assert "1 rank on 1 node\nexperts 32 x 16 float32, isoload: a call " in done.stdout
    times = load("mine.json")
    again = run("measure", "-o", "mine.json", *TINY)  # a times file can be measured again
    assert again.exit_code == 0 and load("mine.json").to_json() != times.to_json()
    ask = ["advise", "--skew", "zipf:1", "--tokens-per-rank", 16, *TINY]
    alone = run(*ask, "--times", "mine.json", "--ranks", 1)
    assert alone.exit_code == 0 and "Every rank holds all experts" in alone.stdout, alone.output
    more = run(*ask, "--times", "mine.json", "--ranks", 4)
    assert more.exit_code == 2
    assert more.stderr == (
        "error: mine.json has no times of dispatch and combine: run isoload measure on the ranks that will serve, "
        "torchrun --nproc-per-node 4 -m isoload measure ...\n"
    )


def test_two_ranks_under_torchrun_give_advice_on_two(folder: Path) -> None:
    """The file of a small run, made by real processes, and its figures in the advice and its page."""
    start = "from isoload.analysis import measuring as m; m.COPIES, m.TOKENS, m.SAMPLE_SECONDS = (1, 8), (1, 16), 0.0"
    (folder / "start.py").write_text(f"{start}\nfrom isoload.__main__ import main\nmain()\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "start.py",
    ]
    done = subprocess.run(
        [*command, "measure", "-o", "two.json", *TINY],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and done.stdout.count("Wrote two.json.") == 1, done.stderr
    printed = " ".join(done.stdout.split())
    assert (
        "dispatch and combine: isoload's, DeepEP not timed: the ranks are on cpu dispatch: a call" in printed
    )
    assert "the weights of an expert move in" in printed
    ask = ["advise", "--skew", "zipf:1", "--tokens-per-rank", 16, "--times", "two.json", *TINY]
    advice = run(*ask, "--ranks", 2, "--json", "-")
    assert advice.exit_code == 0, advice.output
    figures = json.loads(advice.stdout)
    assert figures["kernel"] == "isoload" and figures["warnings"][0].startswith("No trace was given")
    shown = run(*ask, "--ranks", 2).stdout
    assert "Planning takes, as measured for a layer:" in " ".join(shown.split())
    assert ("To run" in shown) == any("isoload's own exchange" in text for text in figures["warnings"])
    wider = " ".join(run(*ask, "--ranks", 3).stdout.split())
    assert "The all-to-all of 3 ranks is extrapolated; measured were 2 ranks." in wider


def test_an_interrupt_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "fit_experts", interrupted)
    assert run("measure", "-o", "mine.json", *TINY).exit_code != 0
    assert not Path("mine.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernel", "mine"], "kernel must be isoload or MODULE:FUNCTION, got 'mine'"),
        (["--kernel", "no_such_module:run"], "kernel no_such_module:run cannot be imported: No module named"),
        (["--kernel", "math:pi"], "kernel math:pi must be a function, got float"),
        (
            ["--dtype", "fp8_block"],
            "dtype must be one of bfloat16, float32, float16, which isoload measure can make",
        ),
        (
            ["--memory", "0.001", "--model", "deepseek-v3"],
            "memory must hold two experts of deepseek-v3, 0.33 GiB, got 0.00 GiB",
        ),
        (["-o", "none/mine.json"], "must be a file in an existing folder or -, got 'none/mine.json'"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(words: list[str], message: str) -> None:
    done = run("measure", "-o", "mine.json", *TINY, *words)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
    assert not Path("mine.json").exists()


def test_scipy_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    done = run("measure", "-o", "mine.json", *TINY)
    assert done.exit_code == 2 and "pip install 'isoload[plan]'" in done.stderr


def test_a_gpu_or_times_are_needed() -> None:
    for words in ([], ["--gpu", "h100", "--times", "mine.json"]):
        done = run("advise", "--skew", "zipf:1", "--ranks", 8, "--tokens-per-rank", 16, *TINY, *words)
        assert done.exit_code == 2 and done.stderr.startswith(
            "error: gpu or times must be given, and not both"
        )


def test_a_kernel_beside_times_is_refused() -> None:
    ask = ["--skew", "zipf:1", "--ranks", 1, "--tokens-per-rank", 16, *TINY]
    done = run("advise", *ask, "--times", "mine.json", "--kernel", "sglang_fused_moe_triton")
    assert done.exit_code == 2 and "kernel must be left out with times" in done.stderr


@pytest.mark.parametrize("size", [(3, 3), (5, 5), (6, 6), (12, 6), (1, 1)])
def test_advice_at_sizes_that_nobody_measured(size: tuple[int, int]) -> None:
    ranks, per_node = size
    ask = ["--ranks", ranks, "--ranks-per-node", per_node, "--tokens-per-rank", 16]
    done = run("advise", "--skew", "zipf:1", "--gpu", "h100", "--model", "gpt-oss-20b", *ask)
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert ("is extrapolated; measured were 8 to" in text or "measured were 8 ranks" in text) == (
        ranks > 1
    ), text
