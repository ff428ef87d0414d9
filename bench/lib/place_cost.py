"""What planning costs: time and memory of the placers, and what a Recorder adds to a layer's call."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoload
from isoload.placers import LiveRanks, Scenarios, make_placer
from isoload.placers.base import make_scenarios
from isoload.placers.compiled import num_threads
from lib.harness import measure
from lib.place_cases import CASES, PLACERS, Rows, read

SIZES = ((32, 9), (64, 5))  # ranks, slots
LIMITS_MS = {"eplb": 5, "search=False": 20}  # else 1000
LIMIT_MB = 200
LIMIT_US = 20


def twelve_scenarios(folder: Path) -> Scenarios | None:
    """58 layers, 256 experts, 12 scenarios: DeepSeek-V3's 8 workloads and 4 of them disturbed."""
    if (trace := read(folder, CASES[0])) is None:
        return None
    counts = trace.batch_counts().astype(float)
    more = counts[:4] * np.exp(0.2 * np.random.default_rng(0).standard_normal(counts[:4].shape))
    return make_scenarios(np.concatenate([counts, more]))[0]


def live_ranks_of(ranks: int, slots: int) -> LiveRanks:
    return LiveRanks(np.zeros(ranks, np.int32), np.ones(ranks), slots)


def best_of(call: Callable[[], Any], times: int = 5) -> float:
    """Milliseconds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


def bench_times(folder: Path) -> Rows:
    if (scenarios := twelve_scenarios(folder)) is None:
        return []
    rows = []
    for ranks, slots in SIZES:
        live_ranks = live_ranks_of(ranks, slots)
        for label, (name, options) in PLACERS.items():
            placer, limit = make_placer(name, options), LIMITS_MS.get(label, 1000)
            took = best_of(lambda placer=placer, live_ranks=live_ranks: placer.place(scenarios, live_ranks))
            judged = {"ms": took, "goal": limit, "met": took <= limit}
            where = {"ranks": ranks, "slots": slots, "placer": label}
            rows.append({**where, **judged, "threads": num_threads(), "load": os.getloadavg()[0]})
    return rows


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def planning_memory(folder: Path, label: str, ranks: int, slots: int) -> tuple[float, float]:
    """MB that planning adds at its peak, and all of the process at that time. In a process of its own."""
    scenarios = twelve_scenarios(folder)
    assert scenarios is not None
    name, options = PLACERS[label]
    placer, live_ranks = make_placer(name, options), live_ranks_of(ranks, slots)
    before = resident_mb()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: importing torch has a higher one
    placer.place(scenarios, live_ranks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return peak - before, peak


def bench_memory(folder: Path) -> Rows:
    if read(folder, CASES[0]) is None:
        return []
    rows = []
    for (ranks, slots), label in ((size, label) for size in SIZES for label in PLACERS):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            more, peak = pool.apply(planning_memory, (folder, label, ranks, slots))
        judged = {"planning_mb": more, "process_mb": peak, "goal": LIMIT_MB, "met": more <= LIMIT_MB}
        rows.append({"ranks": ranks, "slots": slots, "placer": label, **judged})
    return rows


def bench_recorder(folder: Path) -> Rows:
    """Microseconds that recording a batch adds to one layer's call: 58 layers of 256 experts, on the CPU."""
    rows = []
    for ranks in (1, 8):  # a process's own rank, and virtual ones
        recorder = isoload.Recorder(58, 256)
        counts = [torch.randint(0, 99, (256,), dtype=torch.int32) for _ in range(ranks)]
        sources = [object.__new__(type("Layer", (), {})) for _ in range(58)]

        def batch(recorder: Any = recorder, counts: Any = counts, sources: Any = sources) -> None:
            for layer, source in enumerate(sources):
                recorder.add(layer, counts, source)
            recorder.step()

        took = measure(batch, units=58)
        judged = {"goal": LIMIT_US if ranks == 1 else None, "met": ranks > 1 or took.median <= LIMIT_US}
        us = {"us_a_layer": took.median, "us_a_layer_p99": took.p99}
        rows.append({"owned_ranks": ranks, **us, **judged, "load": os.getloadavg()[0]})
    return rows
