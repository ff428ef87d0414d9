"""The scenarios in a process whose isoload has the kernels on tests/native/simt; its answers as JSON on stdout.

simt_run.py kernels SEED... [OP]  of each scenario, or those of an op: digests of its results, one a seed, and what
                             was found
simt_run.py large BYTES...   of each large scenario, by a block's shared memory: the same, and what it took of that
simt_run.py barriers         of each barrier of the source: what is found once it is gone
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

import isoload
from support.simt import Runtime
from support.simt_scenarios import LARGE, SCENARIOS, bits, make_inputs

PATIENCE = 60.0  # seconds until a lane that goes round and round counts as found


def kernels(
    runtime: Runtime, seeds: list[int], scenarios: dict[str, Callable[[], object]] = SCENARIOS
) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        before, early, memsets, digests = runtime.launches, runtime.early_launches, runtime.memsets, []
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
            "memsets": runtime.memsets - memsets,
            "findings": [str(finding) for finding in runtime.take_findings()],
        }
    return said


def large(runtime: Runtime, limits: list[int]) -> dict[str, dict[str, object]]:
    """Of each large scenario on GPUs whose blocks have that much shared memory: kernels' answer, and what it took."""
    for scenario in LARGE.values():
        scenario()  # which makes its inputs
    runtime.take_findings()
    said: dict[str, dict[str, object]] = {name: {} for name in LARGE}
    for name, limit in product(LARGE, limits):
        runtime.limit_shared(limit)
        found = kernels(runtime, [0], {name: LARGE[name]})[name]
        said[name][str(limit)] = {**found, "shared": runtime.most_shared_bytes}
    return said


def barriers(runtime: Runtime) -> list[dict[str, str]]:
    """Each barrier that a scenario comes to, of each of its kernels: what is found once it is gone.

    Until every barrier was missed by a kernel, and every kernel missed one.
    """
    runtime.watch(barriers=True)
    passed: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    expected = {}
    for name, scenario in SCENARIOS.items():
        expected[name] = bits(scenario())
        assert not runtime.take_findings(), name
        for barrier in runtime.take_barriers():
            passed[barrier.place, barrier.kernel][name].add(barrier.number)
    assert not without(runtime, set(), expected), "a child finds something by itself"
    missed: set[str] = set()
    said = []
    for at, numbers in passed.items():
        if missed.issuperset(at):
            continue
        finding = without(runtime, set().union(*numbers.values()), {name: expected[name] for name in numbers})
        if finding:
            missed.update(at)
        said.append({"place": at[0], "kernel": at[1], "finding": finding})
    return said


def without(runtime: Runtime, gone: set[int], expected: dict[str, str]) -> str:
    """What these scenarios find first without these barriers; in a child, for it may not live on. Empty: nothing."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        faulthandler.disable()
        runtime.tell(write)
        for number in gone:
            runtime.skip(number)
        for name, digest in expected.items():
            if bits(SCENARIOS[name]()) != digest:
                os.write(write, f"bits|not those of {name}|0|0|0\n".encode())
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
    if task == "large":
        json.dump(large(runtime, [int(limit) for limit in arguments]), sys.stdout)
    elif task == "kernels":
        seeds = [int(seed) for seed in arguments if seed.isdigit()]
        name = "" if arguments[-1].isdigit() else arguments[-1]
        chosen = {of: scenario for of, scenario in SCENARIOS.items() if of.startswith(name)}
        json.dump(kernels(runtime, seeds, chosen), sys.stdout)
    else:
        json.dump(barriers(runtime), sys.stdout)


if __name__ == "__main__":
    main()
