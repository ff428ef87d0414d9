"""SGLang's load generator, where the package `datasets` is missing: it is imported for data that no test reads."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

if find_spec("datasets") is None:
    missing = ModuleType("datasets")
    missing.__spec__, missing.load_dataset = ModuleSpec("datasets", None), None  # type: ignore[attr-defined]
    sys.modules["datasets"] = missing

from sglang.benchmark import serving

if __name__ == "__main__":
    serving.cli_main()
