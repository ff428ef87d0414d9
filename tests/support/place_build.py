"""The placers' loops built from a folder of sources, and what they are called with."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import isoload
from isoload.placers import scenario
from isoload.placers.compiled import search_slots

# Vectors off and one version of every loop, so that what the shipped build does with vectors is compared with sums in
# plain order.
PLAIN = ("-O1", "-fno-tree-vectorize", "-DISOLOAD_ONE_TARGET")


def build_loops(csrc: Path, folder: Path, *flags: str) -> Path:
    """Their library, in a folder."""
    out, source = folder / "loops.so", csrc / "placers" / "loops.cpp"
    command = ["g++", "-shared", "-fPIC", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", *flags]
    subprocess.run([*command, f"-I{csrc}", str(source), "-pthread", "-o", str(out)], check=True)
    return out


def calls_of(monkeypatch: Any, counts: Any, ranks: int, slots: int, **options: Any) -> list[dict[str, Any]]:
    """The arguments of every search that placing counts makes."""
    found: list[dict[str, Any]] = []

    def recorded(**arguments: Any) -> Any:
        found.append(arguments)
        return search_slots(**arguments)

    monkeypatch.setattr(scenario, "search_slots", recorded)
    isoload.place(counts, isoload.Topology(ranks), slots, "scenario", **options)
    monkeypatch.undo()
    return found
