"""Starts real engines in processes of their own and reads back what they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, tensor

HARNESS = Path(__file__).parent
PACKAGE = HARNESS.parents[2] / "python"
SECONDS = 300  # an engine takes 30 on an idle machine


@dataclass(frozen=True)
class Batch:
    """One layer's copies in one forward pass on one rank: logical ids [T, K] in, slots [T, K] out."""

    layer: int
    ids: Tensor
    slots: Tensor


@dataclass(frozen=True)
class EngineRun:
    """tokens: greedy, per prompt; log: of all processes; batches: of every rank's process, in order."""

    tokens: list[list[int]]
    log: str
    batches: list[list[Batch]]

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.splitlines() if word in line]


def plug_in_path(folder: Path) -> Path:
    """A folder whose metadata declares the harness's plug-in: as good as installed where it is on the path."""
    metadata = folder / "engine_harness-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-harness\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\ncpu_engine = cpu_engine:register\n")
    return folder


def run_sglang(checkpoint: Path, folder: Path, variables: dict[str, str], **options: Any) -> EngineRun:
    """One engine over two CPU processes; `variables` are added to the environment, which has none of isoload's."""
    folder.mkdir()
    path = os.pathsep.join(map(str, (plug_in_path(folder), HARNESS, PACKAGE)))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ISOLOAD_")}
    environment |= {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1", "ENGINE_RECORD": str(folder / "record"),
    }  # fmt: skip
    out = folder / "tokens.json"
    command = [sys.executable, str(HARNESS / "run_engine.py"), str(checkpoint), str(out)]
    command += [f"{key}={json.dumps(value)}" for key, value in options.items()]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            command, env=environment | variables, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS
        )
    text = (folder / "log.txt").read_text()
    assert out.exists(), f"no tokens, exit status {done.returncode}:\n{text[-4000:]}"
    records = [read_batches(path) for path in sorted(folder.glob("record.*"))]
    return EngineRun(json.loads(out.read_text()), text, records)


def read_batches(path: Path) -> list[Batch]:
    rows = map(json.loads, path.read_text().splitlines())
    return [Batch(row["layer"], tensor(row["ids"]), tensor(row["slots"])) for row in rows]
