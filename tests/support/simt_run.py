"""The scenarios in a process whose isoload has the kernels on tests/native/simt; its answers as JSON on stdout.

simt_run.py kernels SEED...    of each scenario: digests of its results, one a seed, and what was found
simt_run.py barriers [LINE...] of each kernel's barriers at these lines ("algorithms/share.h:65"), or of all: what
                               is found first once they are gone; scenario: the first that comes to them
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
from pathlib import Path

import torch

import isoload
from support.simt import Barrier, Runtime
from support.simt_scenarios import SCENARIOS, bits, make_inputs

PATIENCE = 60.0  # seconds until a lane that goes round and round counts as found


def kernels(runtime: Runtime, seeds: list[int]) -> dict[str, object]:
    said: dict[str, object] = {}
    for name, scenario in SCENARIOS.items():
        before, early, digests = runtime.launches, runtime.early_launches, []
        for seed in seeds:
            runtime.seed(seed)
            try:
                digests.append(bits(scenario()))
            except ValueError as error:  # an op refused what a kernel before it made
                digests.append(str(error))
        said[name] = {
            "bits": digests,
            "launches": runtime.launches - before,
            "early": runtime.early_launches - early,
            "findings": [str(finding) for finding in runtime.take_findings()],
        }
    return said


def barriers(runtime: Runtime, lines: list[str]) -> list[dict[str, str]]:
    """A reduction's barriers are the reduction's: they count only where its own line is asked for."""
    runtime.watch(barriers=True)
    seen: set[int] = set()
    said = []
    for name, scenario in SCENARIOS.items():
        scenario()
        assert not runtime.take_findings(), name
        new: dict[tuple[str, str], list[Barrier]] = {}
        for barrier in runtime.barriers():
            at = [str(frame) for frame in barrier.frames if str(frame) in lines]
            if not lines and not barrier.in_reduction:
                at = [str(barrier.line)]
            if at and barrier.number not in seen:
                new.setdefault((barrier.kernel, at[0]), []).append(barrier)
            seen.add(barrier.number)
        for (kernel, line), gone in new.items():
            finding = without(runtime, gone, list(SCENARIOS)[list(SCENARIOS).index(name) :])
            said.append({"kernel": kernel, "line": line, "scenario": name, "finding": finding})
    return said


def without(runtime: Runtime, gone: list[Barrier], scenarios: list[str]) -> str:
    """What is found first once these barriers are gone; in a child, for it may not live on. Empty: nothing in any."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        faulthandler.disable()
        runtime.tell(write)
        for barrier in gone:
            runtime.skip(barrier)
        for name in scenarios:
            SCENARIOS[name]()
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], PATIENCE)
    with os.fdopen(read) as told:
        line = told.readline() if ready else ""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if line:
        return str(runtime.findings_in(line)[0])
    return "" if ready and status == 0 else "no end"


def main() -> None:
    torch.set_num_threads(1)
    runtime = Runtime(next(Path(isoload.__file__).parent.glob("_C*.so")))
    task, *arguments = sys.argv[1:]
    make_inputs()  # by other kernels than the scenario's
    runtime.take_findings()
    if task == "kernels":
        json.dump(kernels(runtime, [int(seed) for seed in arguments]), sys.stdout)
    else:
        json.dump(barriers(runtime, arguments), sys.stdout)


if __name__ == "__main__":
    main()
