"""docs/extending.md: its policy, its placer and its commands; what --plugin refuses; all policies and placers."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isoload
from isoload.analysis.judge import exact_imbalance
from isoload.cli.app import app
from isoload.placers import PLACERS, Placer, register_placer
from isoload.placers.eplb import EplbPlacer
from isoload.policies import POLICIES
from isoload.policies.base import _DEFAULTS
from isoload.policies.plan import plan_errors
from support.documents import PLAIN, blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
SHIPPED = ROOT / "examples" / "traces" / "gptoss20b_decode.npz"


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env=PLAIN)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A folder with the page's two files and the examples; what they register is gone afterwards."""
    for name, code in zip(("my_policy", "my_placer"), blocks(PAGE, "python"), strict=True):
        body = code[code.index("@register") :]
        assert len([line for line in body.splitlines() if line]) <= 15
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    kept = [(known, dict(known)) for known in (POLICIES, PLACERS, _DEFAULTS)]
    (commands,) = blocks(PAGE, "console")
    yield [line.removeprefix("$ isoload ") for line in commands.splitlines()]
    for known, before in kept:
        known.clear()
        known.update(before)
    for name in ("my_policy", "my_placer"):
        sys.modules.pop(f"isoload_plugin_{name}", None)


def test_the_page_s_commands_run(page: list[str]) -> None:
    place, replay, by_placer = page
    placed = run(*shlex.split(place))
    assert placed.exit_code == 0 and "\ndealt " in placed.stdout, placed.output
    del PLACERS["dealt"]  # each command is a process of its own
    replayed = run(*shlex.split(replay), "--max-batches", 1, "--layers", "0-2")
    assert replayed.exit_code == 0 and "\nlast_replica " in replayed.stdout, replayed.output
    done = run(*shlex.split(by_placer), "--max-batches", 1, "--json", "-")
    assert json.loads(done.stdout)["settings"]["placer"] == "dealt"


def test_the_page_s_policy_plans_and_its_placer_places(page: list[str]) -> None:
    run("replay", SHIPPED, "--plugin", "my_policy.py", "--plugin", "my_placer.py", "--max-batches", 1)
    placement = isoload.place(np.arange(1, 25).reshape(2, 12), 4, 4, "dealt")
    assert placement.slot_to_expert[0].view(4, 4).tolist()[0] == [11, 7, 3, 8]
    loads = torch.randint(0, 9, (2, 4, 12), dtype=torch.int32)
    plan = isoload.plan(loads, isoload.place(loads.sum(1), 4, 4), None, "last_replica")
    assert plan_errors(plan, loads) == [] and plan.peak is not None


def test_json_has_every_batch_and_layer(tmp_path: Path) -> None:
    base = ["replay", SHIPPED, "--ranks", 8, "--policies", "in-order,exact", "--json", "-"]
    rows = json.loads(run(*base).stdout)["policies"]
    for row in rows:
        values = {name: np.array(of, dtype=float) for name, of in row["by_batch"].items()}
        assert {of.shape for of in values.values()} == {(7, 24)}
        assert values["imbalance"].mean() == pytest.approx(row["imbalance"]["mean"])
        assert (values["peak"] / values["bound"] - 1).mean() == pytest.approx(row["gap"]["mean"])
    trace = isoload.read_trace(SHIPPED)
    made = isoload.place(trace.batch_counts()[:7], 8, 5)
    wanted = exact_imbalance(made, trace.batch_counts()[7:])
    assert np.allclose(rows[1]["by_batch"]["imbalance"], wanted)
    base = ["place", SHIPPED, "--ranks", 8, "-o", tmp_path / "p.json", "--json", "-"]
    placed = json.loads(run(*base).stdout)["placers"]
    assert np.allclose(placed[1]["by_batch"]["exact"], wanted)


def test_all_policies_and_placers_with_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ["replay", SHIPPED, "--ranks", 8, "--max-batches", 1, "--layers", "0"]
    found = json.loads(run(*base, "--policies", "all", "--json", "-").stdout)
    ran = [row["policy"] for row in found["policies"]]
    assert sorted([*ran, *found["refused"]]) == sorted(["in order, no replicas", *POLICIES])
    assert found["refused"]["joint"].startswith("placement must have shared experts for policy joint")
    shown = " ".join(run(*base, "--policies", "all").stdout.split())
    assert "llep: n/a: spare_slots must be at least 1 for policy llep, got 0" in shown
    refused = run(*base, "--policies", "exact,llep")
    assert refused.exit_code == 2 and "spare-slots must be at least 1 for policy llep" in refused.stderr
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    base = ["place", SHIPPED, "--ranks", 8, "-o", tmp_path / "p.json", "--force", "--placers"]
    found = json.loads(run(*base, "all", "--json", "-").stdout)
    assert {row["placer"] for row in found["placers"]} == {"in order, no replicas", *PLACERS} - {"grace"}
    assert found["refused"] == {"grace": "placer grace needs scikit-learn: pip install 'isoload[plan]'"}
    assert run(*base, "grace").exit_code == 2
    several = run(*base, "eplb, trivial").stdout
    assert re.search(r"^eplb .*\ntrivial ", several, re.M)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "plugin must be a Python file, whose name ends in .py, got 'p.txt'"),
        ("p.py", "x = 1\nraise KeyError('k')\n", "p.py: KeyError: 'k' (line 2)"),
        ("p.py", "def", "p.py: SyntaxError: invalid syntax (p.py, line 1)"),
    ],
)
def test_what_a_plugin_is_refused_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    for words in (["replay", SHIPPED], ["place", SHIPPED, "-o", "o.json", "--ranks", 8]):
        done = run(*words, "--plugin", name)
        assert (done.exit_code, done.stderr) == (2, f"error: {message}\n")
        assert run(*words, "--plugin", "no.py").stderr == "error: no.py: No such file or directory\n"


def test_a_taken_name_is_refused() -> None:
    class Again(EplbPlacer):
        pass

    assert issubclass(Again, Placer)
    with pytest.raises(ValueError, match="^name must be a new one, placer eplb exists$"):
        register_placer(Again)
