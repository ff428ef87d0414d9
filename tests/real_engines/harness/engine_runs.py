"""Starts real engines in processes of their own and reads back what they did."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, bincount, long, tensor

from isoload.analysis.rank_loads import Recorded

HARNESS = Path(__file__).parent
PACKAGE = HARNESS.parents[2] / "python"
SECONDS = 300  # an engine takes 30 on an idle machine
LAST_SECONDS = 10


@dataclass(frozen=True)
class Batch:
    """One layer's copies in one forward pass on one rank: logical ids [T, K] in, slots [T, K] out. Of vLLM also the
    table [P], the expert in each slot."""

    layer: int
    ids: Tensor
    slots: Tensor
    table: Tensor


@dataclass(frozen=True)
class EngineRun:
    """tokens: greedy, per prompt; log: of all processes; batches: of every rank's process, in order."""

    tokens: list[list[int]]
    log: str
    batches: list[list[Batch]]

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.splitlines() if word in line]

    def own_lines(self) -> list[str]:
        """What isoload says; a path of that name is none of it."""
        return [line for line in self.log.splitlines() if re.search(r"isoload( SGLang| vLLM)?: ", line)]


def in_shadow(switch: str, folder: Path) -> dict[str, str]:
    """Variables of shadow mode: every pass is kept; files five times a second, since engines are killed."""
    folder.mkdir()
    often = {"ISOLOAD_RECORD_EVERY": "1", "ISOLOAD_REPORT_SECONDS": "0.2", "ISOLOAD_STRICT": "1"}
    return {switch: "1", "ISOLOAD_MODE": "shadow", "ISOLOAD_RECORD": str(folder), **often}


def check_sent(recorded: Recorded, runs: Sequence[list[Batch]]) -> None:
    """What shadow mode recorded is what left the routers of the ranks that hold tokens, whichever process was which."""
    assert any(all(map(is_sent, recorded.sent, order)) for order in permutations(runs, len(recorded.sent)))


def is_sent(sent: Any, batches: list[Batch]) -> bool:
    """Whether copies [B, L, P] are those of batches, and of more than half of them: engines are killed."""
    slots = sent.shape[2]
    of_batches = (bincount(b.slots[b.slots >= 0], minlength=slots) for b in batches)
    routed = Counter(copies.numpy().tobytes() for copies in of_batches if copies.any())
    found = Counter(copies.astype("int64").tobytes() for copies in sent.reshape(-1, slots) if copies.any())
    return not found - routed and sum(found.values()) > sum(routed.values()) / 2


def plug_in_path(folder: Path, group: str, module: str) -> Path:
    """A folder whose metadata declares the harness's plug-in: as good as installed where it is on the path."""
    metadata = folder / "engine_harness-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-harness\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\ncpu_engine = {module}:register\n")
    return folder


def environment(folder: Path, group: str, module: str, variables: dict[str, str]) -> dict[str, str]:
    """Of an engine's processes: the harness's plug-in, and none of isoload's variables but those given."""
    path = os.pathsep.join(map(str, (plug_in_path(folder, group, module), HARNESS, PACKAGE)))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ISOLOAD_")}
    ours = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ENGINE_RECORD": str(folder / "record"),
    }
    return kept | ours | variables


def run_sglang(checkpoint: Path, folder: Path, variables: dict[str, str], **options: Any) -> EngineRun:
    """One engine over two CPU processes; `variables` are added to the environment, which has none of isoload's."""
    folder.mkdir()
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    given = environment(folder, "sglang.srt.plugins", "cpu_engine", threads | variables)
    started = start("run_engine.py", checkpoint, folder, "tokens", given, options)
    return finish(started, folder, "tokens", SECONDS + len(options.get("lengths", ())))


def run_vllm(checkpoint: Path, folder: Path, variables: dict[str, str], **options: Any) -> EngineRun:
    """The same with vLLM, tensor parallel; its engine runs in the process that starts it, which saves one."""
    folder.mkdir()
    given = vllm_environment(folder, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables)
    return finish(start("run_vllm.py", checkpoint, folder, "tokens", given, options), folder, "tokens")


def run_vllm_pair(
    checkpoint: Path, folder: Path, variables: dict[str, str], **options: Any
) -> list[EngineRun]:
    """Two engines of one process each in a data-parallel group; an all-to-all exchanges their tokens."""
    folder.mkdir()
    pair = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}
    started = []
    for rank in ("0", "1"):
        given = vllm_environment(folder, pair | variables | {"VLLM_DP_RANK": rank})
        options["tensor_parallel_size"] = 1
        started.append(start("run_vllm.py", checkpoint, folder, f"tokens{rank}", given, options))
    return [finish(process, folder, f"tokens{rank}") for rank, process in enumerate(started)]


def refused_vllm(checkpoint: Path, folder: Path, variables: dict[str, str], **options: Any) -> str:
    """The log of an engine that must not start."""
    with pytest.raises(AssertionError, match="no tokens, exit status"):
        run_vllm(checkpoint, folder, variables, **options)
    return (folder / "tokens.log").read_text()


def vllm_environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    return environment(folder, "vllm.general_plugins", "vllm_cpu", own | variables)


def start(
    script: str, checkpoint: Path, folder: Path, name: str, environ: dict[str, str], options: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that :func:`finish` can end all of its processes."""
    command = [sys.executable, str(HARNESS / script), str(checkpoint), str(folder / f"{name}.json")]
    command += [f"{key}={json.dumps(value)}" for key, value in options.items()]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], folder: Path, name: str, seconds: float = SECONDS) -> EngineRun:
    """Waits for an engine, and leaves none of its processes behind."""
    try:
        process.wait(seconds)
        deadline = time.monotonic() + LAST_SECONDS
        while (
            time.monotonic() < deadline
        ):  # its processes unlink their shared memory when they end by themselves
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    except ProcessLookupError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    out, text = folder / f"{name}.json", (folder / f"{name}.log").read_text()
    assert out.exists(), f"no tokens, exit status {process.returncode}:\n{text[-4000:]}"
    records = [read_batches(path) for path in sorted(folder.glob("record.*"))]
    return EngineRun(json.loads(out.read_text()), text, records)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def read_batches(path: Path) -> list[Batch]:
    rows = map(json.loads, path.read_text().splitlines())
    return [
        Batch(row["layer"], *(tensor(row.get(name, []), dtype=long) for name in ("ids", "slots", "table")))
        for row in rows
    ]
