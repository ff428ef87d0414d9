"""The CUDA kernels give the CPU's bits without a GPU: their blocks run lane by lane on one core.

The tests of the ops run again, on a library whose ops call csrc/cuda. Refusals of values are the CPU's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import one_core_build

# Small ones of every op; a barrier of 128 lanes costs 128 changes of context here.
CHOSEN = {
    "count": "not refuses",
    "replica_tables": "equals_reference or layers",
    "share_alone": "equals_reference or layers",
    "share": "layers or largest",
    "plan_exact": "(wide_groups or layers_at_once or overflow) and not refuses",
    "plan_waterfill": "(wide_groups or layers_at_once or overflow) and not refuses",
    "plan_active": "(layers_at_once or overflow) and not refuses",
    "plan_lp": "equals_reference_with or layers_at_once or nothing",
    "round_split": "by_hand or layers_at_once or largest",
    "plan_spill": "named or layers_at_once",
    "route": "equals_reference_where or nothing or 12-empty_slots",
    "route_shared": "equals_reference and (1-True or 2-False)",
    "route_shared_sampled": "equals_reference",
    "append_shared_expert": "equals_reference",
    "borrow": "equals_reference",
    "device_errors": "noted",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_core_build.build(tmp_path_factory.mktemp("one_core"))


@pytest.mark.slow
@pytest.mark.parametrize("op", CHOSEN)
def test_op(op: str, package: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", CHOSEN[op]]
    done = subprocess.run(
        [*command, f"tests/ops/test_{op}.py"],
        cwd=one_core_build.ROOT,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
