"""Tests inside of real engines: `make test-sglang` and `make test-megatron`, each in a virtual environment of its own;
elsewhere none is there."""

import sys
from importlib.util import find_spec
from pathlib import Path

HARNESS = Path(__file__).parent / "harness"
collect_ignore_glob = []

if find_spec("megatron") is None:
    collect_ignore_glob.append("test_megatron_*.py")
else:
    sys.path.insert(0, str(HARNESS))
if find_spec("sglang") is None:
    collect_ignore_glob.append("test_sglang_*.py")
else:
    sys.path.insert(0, str(HARNESS))
    import torchvision_names  # noqa: F401
    from one_process import attached, placement  # noqa: F401  # fixtures
