"""Tests inside of real engines: `make test-sglang` and `make test-vllm`, each in a virtual environment of its own;
elsewhere neither engine is there."""

import sys
from importlib.util import find_spec
from pathlib import Path

HARNESS = Path(__file__).parent / "harness"
collect_ignore_glob = [f"test_{engine}_*.py" for engine in ("sglang", "vllm") if find_spec(engine) is None]

if len(collect_ignore_glob) < 2:
    sys.path.insert(0, str(HARNESS))
if find_spec("sglang") is not None:
    import torchvision_names  # noqa: F401
    from one_process import attached, placement  # noqa: F401  # fixtures
