"""The example for transformers runs under torchrun, and isoload's losses are those of transformers' own exchange."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_losses_are_those_of_transformers():
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    script += ["examples/finetune_transformers.py", "--steps=3"]
    ran = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    *shown, note = ran.stdout.strip().splitlines()
    assert note.startswith("The tokens per second above are no claim.") or torch.cuda.is_available()
    lines = [line.split() for line in shown]
    (stock, ours), speeds = lines[::2], lines[1::2]
    assert (stock[0], ours[0]) == ("all_to_all", "isoload")
    losses, levels = (
        [[float(x.strip(";,")) for x in line[part]] for line in (ours, stock)]
        for part in (slice(2, 5), slice(-2, None))
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert " ".join(stock[5:-2]) == " ".join(ours[5:-2]) == "busiest rank over the mean, by layer:"
    assert max(levels[0]) < 1.05 < min(levels[1])
    assert [line[0] for line in speeds] == ["all_to_all", "isoload"]
    assert all(line[2:] == ["tokens", "per", "second"] and float(line[1]) > 0 for line in speeds)
