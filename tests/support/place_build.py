"""isoload._place built from a folder of sources, and what its loops are called with."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import isoload
from isoload.placers import scenario
from isoload.placers.compiled import loops

# Vectors off and one version of every loop, so that what the shipped build does with vectors is compared with sums in
# plain order.
PLAIN = ("-O1", "-fno-tree-vectorize", "-DISOLOAD_ONE_TARGET")


def build_place(csrc: Path, folder: Path, *flags: str) -> Path:
    """The module, in a folder."""
    try:
        import pybind11

        headers = pybind11.get_include()
    except ImportError:
        headers = str(Path(torch.__file__).parent / "include")
    includes = [f"-I{csrc}", f"-isystem{headers}", f"-isystem{sysconfig.get_path('include')}"]
    out = folder / f"_place{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["g++", "-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", *flags]
    source = str(csrc / "placers" / "bind.cpp")
    subprocess.run([*command, *includes, source, "-pthread", "-o", str(out)], check=True)
    return out


def load_place(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("isoload._place", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls_of(monkeypatch: Any, counts: Any, ranks: int, slots: int, **options: Any) -> list[dict[str, Any]]:
    """The arguments of every search that placing counts makes."""
    found: list[dict[str, Any]] = []

    class Recorded:
        def scenario(self, **arguments: Any) -> Any:
            found.append(arguments)
            return loops().scenario(**arguments)

    monkeypatch.setattr(scenario, "loops", Recorded)
    isoload.place(counts, isoload.Topology(ranks), slots, "scenario", **options)
    monkeypatch.undo()
    return found
