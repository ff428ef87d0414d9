"""The placers' inner loops: compiled (csrc/placers), or where they were not built, the same slots in NumPy."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

from isoload.reference.place_eplb import place_eplb
from isoload.reference.place_scenario import place_scenario


@cache
def loops() -> Any:
    """The functions ``eplb`` and ``scenario``; csrc/placers/bind.cpp has their arguments."""
    if why := why_not_compiled():
        warnings.warn(f"placers run in NumPy, many times slower: {why}", stacklevel=2)
        return SimpleNamespace(eplb=place_eplb, scenario=place_scenario)
    return importlib.import_module("isoload._place")


def why_not_compiled() -> str | None:
    """Why the compiled loops are not here; None if they are."""
    try:
        importlib.import_module("isoload._place")
    except ModuleNotFoundError:
        return "isoload._place was not built for this Python, which needs Python.h: run `make build`"
    return None


def num_threads() -> int:
    """CPUs that this process may use. The slots are the same for any number."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
