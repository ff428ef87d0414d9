"""Tests inside of real engines: `make test-sglang`, in a virtual environment of its own; elsewhere none is there."""

import sys
from importlib.util import find_spec
from pathlib import Path

HARNESS = Path(__file__).parent / "harness"

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_sglang_*.py"]
else:
    sys.path.insert(0, str(HARNESS))
    import torchvision_names  # noqa: F401
    from one_process import attached, placement  # noqa: F401  # fixtures
