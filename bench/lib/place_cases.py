"""What bench_place.py places and judges: traces, how they are split into seen and unseen batches, ranks and goals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import isoload
from isoload.analysis.judge import judge_unseen
from isoload.traces import Trace, read_trace
from lib import trace_files

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A trace, how it is split into seen and unseen batches, the ranks, and the goals: even / exact of `scenario`,
    exact of `scenario` planned for the exact split."""

    name: str
    file: str
    calibrate: str
    ranks: int
    slots: int | None
    goals: tuple[float, float, float]
    stretches: int = 0


CASES = (
    Case("DeepSeek-V3", "dsv3_sglang_longin", "leave-cluster-out", 32, 9, (1.095, 1.057, 1.048)),
    Case("DeepSeek-V3", "dsv3_sglang_longin", "leave-cluster-out", 64, 5, (1.155, 1.098, 1.072)),
    Case("GLM-5.2", "glm52_domains_a", "interleaved", 32, 9, (1.370, 1.285, 1.268)),
    Case("GLM-5.2", "glm52_domains_a", "interleaved", 64, 5, (1.655, 1.510, 1.480)),
    Case("Gemma-4", "gemma4_26b_themes", "leave-cluster-out", 16, 9, (1.250, 1.110, 1.075)),
    Case("gpt-oss-20b", "gptoss20b_decode_mmlu", "first-half", 8, 5, (1.090, 1.020, 1.005), 32),
)
LEFT_OUT = Case("GLM-5.2, a domain left out", "glm52_domains_a", "leave-cluster-out", 32, 9, (np.inf,) * 3)
PLACERS = {
    "eplb": ("eplb", {}),
    "search=False": ("scenario", {"search": False}),
    "scenario": ("scenario", {}),
    "split=exact": ("scenario", {"split": "exact"}),
}


def read(folder: Path, case: Case) -> Trace | None:
    if not (path := trace_files.present(folder, case.file).get(case.file)):
        return None
    trace = read_trace(path)
    if not case.stretches:
        return trace
    counts = np.stack([part.sum(0) for part in np.array_split(trace.batch_counts()[10:], case.stretches)])
    return Trace(trace.name, trace.num_experts, trace.top_k, counts)


def present(folder: Path, cases: Iterable[Case] = CASES) -> Iterator[tuple[Case, Trace, dict[str, Any]]]:
    """Cases whose trace is there, and what their rows say of them."""
    for case in cases:
        if (trace := read(folder, case)) is not None:
            yield case, trace, {"trace": case.name, "ranks": case.ranks, "slots": case.slots}


def unseen(trace: Trace, case: Case, placer: str, options: dict[str, Any]) -> dict[str, float]:
    """Mean imbalance over unseen batches and layers, even and exact."""
    topology = isoload.Topology(case.ranks)
    place = lambda seen: isoload.place(seen, topology, case.slots, placer, **options)  # noqa: E731
    return dict(zip(("even", "exact"), judge_unseen(trace, case.calibrate, place), strict=True))
