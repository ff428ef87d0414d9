"""The example for router replay: equal losses with and without plans, which level the ranks and gather nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_losses_are_equal_and_plans_are_level():
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = [sys.executable, "-W", "ignore", "examples/router_replay.py", "--steps=2"]
    ran = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    pattern = r"loss (.*?)  imbalance (\S+)  weights (\S+) MB, gathered loads (\S+) MB"
    (own, known) = (re.search(pattern, line).groups() for line in ran.stdout.splitlines() if "loss" in line)
    assert own[0] == known[0] and len(own[0].split()) == 2
    assert float(own[1]) > 1.5 > 1.01 > float(known[1])
    assert float(own[2]) == 0 < float(known[2]) and float(known[3]) == 0
