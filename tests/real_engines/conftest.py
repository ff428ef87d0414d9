"""Tests inside of real engines: `make test-sglang`, `test-vllm`, `test-megatron`, each in a virtual environment of its
own; elsewhere no engine is there."""

import sys
from importlib.util import find_spec
from pathlib import Path

HARNESS = Path(__file__).parent / "harness"
ENGINES = ("sglang", "vllm", "megatron")
collect_ignore_glob = [f"test_{engine}_*.py" for engine in ENGINES if find_spec(engine) is None]

if len(collect_ignore_glob) < len(ENGINES):
    sys.path.insert(0, str(HARNESS))
if find_spec("sglang") is not None:
    import torchvision_names  # noqa: F401
    from one_process import attached, placement  # noqa: F401  # fixtures
