"""Timing rules and result records, written once for every bench.

Rules: one torch thread; inputs made before the clock starts; warm-up first; many short samples of which the median
and the 99th percentile are kept; rivals alternate with us in the same run on the same instances, so a slow moment
of the machine hits both; the losses are printed like the wins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parents[1] / "results"


def command(ledger: str) -> argparse.ArgumentParser:
    """A bench's command line, whose help is its docstring."""
    return argparse.ArgumentParser(description=ledger, formatter_class=argparse.RawDescriptionHelpFormatter)


def begin(ledger: str, *more: object) -> None:
    """One thread from here on; prints the docstring and the machine where they do not get into the tables."""
    torch.set_num_threads(1)
    print(ledger.strip(), "\n", file=sys.stderr)
    print(machine(), *more, file=sys.stderr)


@dataclass(frozen=True)
class Timing:
    """Microseconds per unit of work over many samples."""

    median: float
    p99: float


def measure(call: Callable[[], Any], units: int = 1, seconds: float = 0.2, least: int = 20) -> Timing:
    """Times `call`, which does `units` units of work, for about `seconds`."""
    call(), call()
    samples = []
    end = time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3 / units)
    return Timing(float(np.median(samples)), float(np.percentile(samples, 99)))


def over_instances(medians: list[float]) -> Timing:
    """The spread over instances of each one's median."""
    return Timing(float(np.median(medians)), float(np.percentile(medians, 99)))


def machine(device: str = "cpu") -> dict[str, str]:
    """Where and on what these numbers were taken. ISOLOAD_COMMIT says the commit of a copy without a repository."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line),
            cpu,
        )
    commit = os.environ.get("ISOLOAD_COMMIT") or _git_describe()
    on_gpu = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{cpu}, 1 thread",
        "torch": torch.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def network(backend: str, device: torch.device) -> dict[str, str]:
    """What joins the ranks: the backend and, on GPUs, their links and NCCL's version."""
    if device.type != "cuda":
        return {"backend": backend}
    try:
        told = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        told = ""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"backend": backend, "links": gpu_links(told), "nccl": nccl}


def gpu_links(matrix: str) -> str:
    """The kinds of link between a machine's GPUs, from what ``nvidia-smi topo -m`` prints, e.g. "NV18 x56"."""
    lines = [line.split("\t") for line in re.sub(r"\x1b\[\d*m", "", matrix).splitlines()]
    gpus = [cells for cells in lines if re.fullmatch(r"GPU\d+", cells[0].strip())]
    if not gpus:
        return "unknown"
    found = [cell.strip() for cells in gpus for cell in cells[1 : len(gpus) + 1]]
    kinds = sorted({kind for kind in found if kind != "X"})
    return ", ".join(f"{kind} x{found.count(kind)}" for kind in kinds) or "one GPU"


def _git_describe() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


class ResultFile:
    """<folder>/<name>.jsonl, begun anew: one JSON object per row, each with the machine.

    A row is on the disk when add returns, so what ends a bench early costs the rows after it only.
    """

    def __init__(self, name: str, device: str = "cpu", folder: Path = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._where = folder / f"{name}.jsonl", machine(device)
        self.path.write_text("")

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            where = {
                key: value for key, value in self._where.items() if key not in row
            }  # rows kept from before
            file.write(json.dumps(row | where) + "\n")


def read_results(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of a results file, with the machine of each."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_results(name: str, rows: list[dict[str, Any]], device: str = "cpu", folder: Path = RESULTS) -> Path:
    """All rows at once, for a bench of seconds."""
    results = ResultFile(name, device, folder)
    for row in rows:
        results.add(row)
    return results.path
