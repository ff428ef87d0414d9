"""bench/cluster.sh on a CPU: every row has an outcome, one that hangs ends alone, and the options that it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "setup.py").exists())


def cluster(processes: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    ports = {2: "29611", 4: "29711"}
    env = os.environ | {"PYTHON": sys.executable, "PROCESSES": str(processes), "PORT": ports[processes]}
    script = [ROOT / "bench" / "cluster.sh", *words]
    return subprocess.run(script, env=env, capture_output=True, text=True, timeout=500)


def rows(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["rows"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_dry_run_is_right(processes: int, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    done = cluster(processes, "--dry-run", file)
    found = rows(file)
    assert done.returncode == 0, done.stdout + done.stderr
    reasons = {name: of["text"] for name, of in found.items() if of["outcome"] == "left out"}
    assert {of["outcome"] for of in found.values()} == {"right", "left out"}
    assert {
        "machines",
        "gather",
        "borrow_all_to_all",
        "memory",
        "writes",
    } <= found.keys() - reasons.keys()
    assert {"layer_none", "layer_exact", "layer_llep"} <= found.keys() - reasons.keys()
    assert all("GPUs" in text or "read each other's memory" in text for text in reasons.values())
    assert str(file) in done.stdout and all(name in done.stdout for name in found)


@pytest.mark.slow
def test_a_row_that_hangs_ends_and_the_next_one_runs(tmp_path: Path) -> None:
    """With a limit that no row keeps every row is hung, and each has an outcome of its own."""
    file = tmp_path / "cluster.json"
    done = cluster(2, "--dry-run", "--only", "machines,gather", "--limit", "0.0001", file)
    assert done.returncode == 1
    assert {name: of["outcome"] for name, of in rows(file).items()} == {"machines": "hung", "gather": "hung"}
    assert "longer than 0.0001 s on rank 0" in rows(file)["gather"]["text"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "speed"], "--only must be of machines, gather,"),
        (["--dry-run", "--limit", "0"], "--limit must be above 0, got 0"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], message: str) -> None:
    done = cluster(2, *words)
    assert done.returncode == 2 and message in done.stderr
