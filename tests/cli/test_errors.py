"""Whatever goes wrong ends in one line and an exit code: control characters, a full disk, Ctrl-C, a closed pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.traces import Trace, write_trace
from support.documents import PLAIN
from support.measured_times import written

NAME, SHOWN = "run\x1b[31m\u202e", "run\\x1b[31m\\u202e"
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace whose name, model and clusters would be executed by a terminal, and a placement made of it."""
    counts = np.random.default_rng(1).integers(1, 50, (6, 2, 8))
    labels = ("a\x1b[2J",) * 3 + ("b\x9b",) * 3
    trace = Trace(NAME, 8, 2, counts=counts, cluster=labels, provenance={"model": "m\x07"})
    write_trace(trace, tmp_path / "run.npz")
    isoload.write_placement(isoload.place(trace, isoload.Topology(4), 3), tmp_path / "plan.json")
    written(tmp_path / "times.json", unit="\x1b[2J")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = {
    "inspect": ["inspect", "run.npz"],
    "inspect a placement": ["inspect", "run.npz", "--placement", "plan.json"],
    "replay": ["replay", "run.npz", "--ranks", "4"],
    "replay a placement": ["replay", "run.npz", "--placement", "plan.json", "--calibrate", "all"],
    "replay with a times file": ["replay", "run.npz", "--ranks", "4", "--times", "times.json"],
    "place": ["place", "run.npz", "--ranks", "4", "-o", "new\x1b.json"],
    "convert": ["convert", "plan.json", "--format", "vllm", "-o", "new\x1b.json"],
    "doctor": ["doctor", "plan.json"],
    "a page": ["inspect", "run.npz", "--html", "page.html"],
    "a file that is not there": ["inspect", "no\x1b[31m.npz"],
    "a file name of other bytes": ["inspect", "no\udcff.npz"],
    "an option's value": ["replay", "run.npz", "--policies", "ex\x1bact"],
    "an option": ["replay", "run.npz", "--no\x1bpe"],
    "a command": ["in\x1bspect"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_text_of_a_file_reaches_the_terminal_as_control_characters(folder: Path, name: str) -> None:
    done = CliRunner().invoke(app, COMMANDS[name], env=PLAIN)
    assert done.exit_code in (0, 2), done.output
    page = Path("page.html").read_text() if name == "a page" else ""
    for text in (done.stdout, done.stderr, page):
        assert all(line.isprintable() for line in text.replace("\N{NO-BREAK SPACE}", " ").splitlines())
    if name in ("inspect", "replay"):
        assert done.stdout.splitlines()[0] == f"{SHOWN} (m\\x07)"


def isoload_command(*words: str, before: str = "pass") -> list[str]:
    """The command as its script runs it, after a line of Python."""
    code = f"import sys; sys.argv = ['isoload', *{words}]; import isoload_command as c; {before}; c.main()"
    return [sys.executable, "-c", code]


@FULL
@pytest.mark.parametrize(
    "words", [("inspect", "run.npz"), ("inspect", "run.npz", "--json", "-"), ("--help",)], ids=" ".join
)
def test_a_full_disk_is_one_line(folder: Path, words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(isoload_command(*words), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: stdout: No space left on device\n")


def test_a_reader_that_ends_is_no_error(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        isoload_command("inspect", "run.npz"), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


INTERRUPT = "lambda *_, **__: signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    "where",
    [
        f"import signal; sys.meta_path.insert(0, type('F', (), dict(find_spec={INTERRUPT})))",
        f"import signal, isoload.cli.arguments as t; t.check_targets = {INTERRUPT}",
    ],
    ids=["in an import", "in a command"],
)
def test_an_interrupt_is_one_line(folder: Path, where: str) -> None:
    done = subprocess.run(isoload_command("inspect", "run.npz", before=where), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay"], "Missing argument"),
        (["replay", "run.npz", "--nope"], "No such option: --nope"),
        (["replay", "run.npz", "--ranks", "x"], "--ranks"),
        (["nope"], "No such command"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, words, env=PLAIN)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and message in done.stderr
