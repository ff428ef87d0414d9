"""The ops' tests on CUDA (tests/conftest.py), as far as a machine without a GPU can tell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.slow  # a process of pytest each, one of which collects all

PROBES = """
import torch
from isoload import ops
IDS = torch.tensor([[0, 3]])
def bound(op=ops.count):
    return op(IDS, 4)
def test_calls():
    ops.count(IDS, 4)
def test_bound_before_the_fixture():
    bound()
def test_takes_any_error():
    try:
        bound()
    except Exception:
        pass
def test_makes_no_call():
    pass
"""


def runs_on_cuda(folder: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "--without-gpu", "-p", "no:cacheprovider", "-rf"]
    path = os.pathsep.join(
        [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )  # conftest.py's own imports
    variables = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=600, env=variables)
    return done.stdout[-3000:]


def test_every_run_on_cuda_comes_to_the_device() -> None:
    told = runs_on_cuda(TESTS / "ops")
    passed = re.search(r"(\d+) passed", told)
    assert passed and int(passed[1]) > 1000 and not re.search("failed|error", told), told


def test_a_run_on_cuda_that_makes_no_call_there_fails(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "test_count_probes.py").write_text(PROBES)
    shutil.copy(TESTS / "conftest.py", tmp_path)
    told = runs_on_cuda(tmp_path)
    assert "3 passed" in told and "1 failed" in told and "test_makes_no_call[cuda]" in told, told
