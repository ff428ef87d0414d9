"""bench/cuda.sh without a GPU: what it would run, in which order, within which time; and what of it a CPU can run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "setup.py").exists())
STEPS = [
    *("machine", "build", "imports", "one_op", "check", "quick", "ncu", "ncu_details"),
    *("memcheck", "racecheck", "synccheck", "tests", "bench", "kernels", "dispatch", "forward", "gradients"),
    "symmetric",
]
ON_A_CPU = ["simt_build", "check_cpu", "check_simt", "same_bits"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_dry_run(tmp_path: Path) -> None:
    """The CUDA sources on tests/native/simt give the CPU's bits of every op at every size that a GPU is checked at."""
    command = ["bench/cuda.sh", "--dry-run", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.findall(r"^== (\w+), (?:at most|beside)", done.stdout, re.M) == STEPS + ON_A_CPU
    (limits,) = re.findall(r"the limits add up to (\d+) s", done.stdout)
    assert int(limits) <= 660
    for name in ("tests", "forward", "gradients", "symmetric"):
        collected = re.findall(r"(test_\w+)\.py: (\d+)", (tmp_path / f"{name}.log").read_text())
        assert collected and all(int(count) > 0 for _, count in collected), name
        if name == "tests":
            found = {file for file, _ in collected}
            assert {"test_cuda", "test_cuda_layer", "test_device_errors", "test_kernels_cuda"} <= found
            assert {"test_count", "test_plan_exact", "test_route", "test_share"} <= found
    checked = (tmp_path / "check_simt.log").read_text().splitlines()
    assert len(checked) > 90 and checked == (tmp_path / "check_cpu.log").read_text().splitlines()


def test_a_hung_test_ends_with_its_process(tmp_path: Path) -> None:
    """Also one that holds the interpreter's lock, as a CUDA call may: no thread or signal handler of Python runs."""
    (tmp_path / "test_hang.py").write_text(
        "import ctypes\n\ndef test_hang():\n    ctypes.PyDLL(None).sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-o", "faulthandler_timeout=1", str(tmp_path / "test_hang.py")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1 and "Timeout (0:00:01)!" in done.stderr and "test_hang.py" in done.stderr
