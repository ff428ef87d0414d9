"""What a command writes: never a file that it reads, nor one that holds something else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.cli.arguments import check_targets
from isoload.traces import Trace, write_trace
from support.documents import PLAIN
from support.measured_times import written
from support.sglang_recording import Recording
from support.sweeps import slow

RANKS = ("--ranks", 4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A trace of before with its .json, one of today, a placement, a cost file and a stranger's JSON."""
    counts = np.random.default_rng(1).integers(1, 50, (6, 2, 8))
    np.savez(tmp_path / "old.npz", counts=counts)
    (tmp_path / "old.json").write_text('{"top_k": 2, "model": "m"}')
    write_trace(Trace("run", 8, 2, counts=counts), tmp_path / "run.npz")
    isoload.write_placement(isoload.place(counts, isoload.Topology(4), 3), tmp_path / "plan.json")
    written(tmp_path / "times.json")
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env=PLAIN)


def refused(*args):
    """The error, after which every file is as it was."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return result.stderr.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("command", "target", "owner"),
    [
        (("place", "old.npz", *RANKS, "-o"), "old.json", "old.npz"),
        (("place", "run.npz", *RANKS, "-o"), "run.json", "run.npz"),
        (("place", "run.npz", "old.npz", *RANKS, "-o"), "old.npz", "old.npz"),
        (("place", "run.npz", *RANKS, "-o"), "link.npz", "run.npz"),
        (("place", "run.npz", *RANKS, "-o"), "hard.npz", "run.npz"),
        (("place", "run.npz", *RANKS, "--before", "plan.json", "-o"), "plan.json", "plan.json"),
        (("place", "run.npz", *RANKS, "--against", "plan.json", "-o"), "plan.json", "plan.json"),
        (("place", "dumps", *RANKS, "-o"), "dumps/plan.json", "dumps"),
        (("convert", "plan.json", "--format", "vllm", "-o"), "plan.json", "plan.json"),
        (("replay", "old.npz", *RANKS, "--json"), "old.json", "old.npz"),
        (("replay", "old.npz", "--placement", "plan.json", "--json"), "plan.json", "plan.json"),
        (("replay", "old.npz", *RANKS, "--times", "times.json", "--json"), "times.json", "times.json"),
        (("inspect", "old.npz", "--json"), "old.json", "old.npz"),
        (("demo", "old.npz", "--json"), "old.json", "old.npz"),
    ],
)
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_no_command_writes_to_what_it_reads(folder, command, target, owner, force):
    Path("link.npz").symlink_to("run.npz")
    Path("hard.npz").hardlink_to("run.npz")
    (folder / "dumps").mkdir()
    Recording(11, folder / "dumps").save()
    name = "output" if "-o" in command else "json"
    assert refused(*command, target, *force) == (
        f"{name} must be no file that is read, got {target!r}, which belongs to {owner}"
    )


PLACE = ("place", "run.npz", *RANKS, "--placer", "eplb")


@pytest.mark.parametrize("target", ["old.npz", "old.json", "package.json", "notes.txt"])
def test_no_file_of_another_kind_is_replaced(folder, target):
    new = f"output must be a new file, or --force be given to replace a placement, got {target!r}"
    assert refused(*PLACE, "-o", target) == new
    other = f"output must be a new file or replace a placement, got {target!r} of another kind"
    assert refused(*PLACE, "-o", target, "--force") == other
    assert refused("inspect", "run.npz", "--json", target) == (
        f"json must be a new file or replace figures, got {target!r} of another kind, which takes --force"
    )
    assert run("inspect", "run.npz", "--json", target, "--force").exit_code == 0
    assert "layers" in json.loads(Path(target).read_text())


def test_a_placement_is_no_figures_and_figures_are_no_placement(folder):
    assert "replace figures, got 'plan.json' of" in refused("doctor", "--json", "plan.json")
    assert run("inspect", "run.npz", "--json", "figures.json").exit_code == 0
    assert "of another kind" in refused(*PLACE, "-o", "figures.json", "--force")


@pytest.mark.parametrize("format", list(isoload.placement.files.FORMATS))
def test_force_replaces_a_placement_of_any_format(folder, format):
    there = "there.json"
    isoload.write_placement(isoload.read_placement("plan.json").with_moe_layers(0), there, format)
    old = Path(there).read_bytes()
    assert "--force" in refused(*PLACE, "-o", there)
    assert run(*PLACE, "-o", there, "--force").exit_code == 0
    assert Path(there).read_bytes() != old and isoload.read_placement(there).provenance["placer"] == "eplb"


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "run.npz", *RANKS, "--policies", "even"),
        (*PLACE, "-o", "-"),
        ("inspect", "run.npz"),
        *slow((("inspect", "run.npz", "--placement", "plan.json"),), (("doctor",),)),
    ],
)
def test_what_json_writes_is_replaced_without_force(folder, command):
    for force in ((), (), ("--force",)):
        assert run(*command, "--json", "figures.json", *force).exit_code == 0


def test_an_empty_file_holds_nothing_to_lose(folder):
    Path("new").touch()
    assert run(*PLACE, "-o", "new").exit_code == 0


@pytest.mark.parametrize(
    ("output", "figures"), [("x", "x"), ("x", "./x"), ("-", "-"), ("-", "/dev/stdout"), ("/dev/fd/1", "-")]
)
def test_two_documents_never_go_to_one_place(folder, output, figures):
    said = refused(*PLACE, "-o", output, "--json", figures)
    assert said == f"output and json must be two files, got {output!r} and {figures!r}"


def test_a_placement_to_stdout_is_all_that_stands_there(folder):
    result = run(*PLACE, "-o", "-")
    assert json.loads(result.stdout)["format"] == "isoload-placement" and "eplb" in result.stderr


def test_a_trace_keeps_what_it_says(folder):
    """The loss that began this: the plan beside a trace, read as its description."""
    before = isoload.read_trace("run.npz")
    shutil.copy("plan.json", "run.json")
    after = isoload.read_trace("run.npz")
    assert (after.name, after.top_k, after.provenance) == (before.name, before.top_k, before.provenance)


def test_nothing_is_asked_of_devices():
    check_targets([], False, "/dev/null", "-")
