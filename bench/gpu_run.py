"""Everything on a machine with a GPU, in three parts of at most nine minutes each; no network.

A part writes a log per step, with the results beside them, into build/gpu/logs/partN, and packs that folder after every
step into FOLDER/partN.tar.gz, the one file to bring back. A step that fails does not keep the others back; what passes
its limit gets SIGINT, which lets pytest and the benches say what they have, and ten seconds later SIGKILL. The last
line and the exit status tell.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lib.gpu_steps import PARTS, Step, on_a_cpu, steps

sys.path.append(str(Path(__file__).resolve().parents[1] / "csrc" / "cuda"))
import nvcc

ROOT = Path(__file__).resolve().parents[1]
LIMIT, GRACE = 540, 10  # seconds of a part; from SIGINT to SIGKILL
SHOWN = 30  # lines of a log that are repeated here
LARGEST = 8 * 2**20  # of a file that is packed


def run(step: Step, command: Sequence[str | Path], seconds: float, log: Path) -> int:
    """The status; 124 of what ran out of time. Nothing that it started is left."""
    paths = [
        step.env.get("PYTHONPATH"),
        str(ROOT / "python"),
        str(ROOT / "tests"),
        os.environ.get("PYTHONPATH"),
    ]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | step.env
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):  # as in a shell's background: children would be deaf too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pack(logs: Path, archive: Path) -> None:
    """Whole or not at all; what is too large to bring back stays."""
    unfinished = archive.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w:gz") as tar:
        for path in sorted(logs.rglob("*")):
            if path.is_file() and path.stat().st_size <= LARGEST:
                tar.add(path, path.relative_to(logs.parent))
    unfinished.replace(archive)


class Part:
    """The steps of a part within its time."""

    def __init__(self, number: int, logs: Path, folder: Path, dry: bool, limit: float = LIMIT) -> None:
        self.logs, self.archive, self.dry = logs / f"part{number}", folder / f"part{number}.tar.gz", dry
        self.end = time.monotonic() + (float("inf") if dry else limit)
        self.failed: list[str] = []
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)

    def do(self, todo: Sequence[Step]) -> list[str]:
        """The names of the steps that failed."""
        for step in todo:
            command, patience = (step.dry, 900) if self.dry else (step.command, step.seconds)
            print(f"\n== {step.name}, at most {step.seconds} s: {shown(step)}", flush=True)
            if command is None:
                continue
            seconds = min(patience, self.end - time.monotonic() - 2 * GRACE)  # as long again to pack
            tool = nvcc.find(str(command[0]))
            if tool is None or seconds < GRACE:
                why = f"no {command[0]}" if tool is None else "no time"
                print(f"== {step.name}: left out, {why}")
                self.failed.append(f"{step.name} ({why})")
            else:
                self.run(step, [tool, *command[1:]], seconds)
            if step.needed and self.failed and self.failed[-1].startswith(step.name):
                print(f"== without {step.name} nothing else can run")
                break
        return self.failed

    def run(self, step: Step, command: Sequence[str | Path], seconds: float) -> None:
        start, log = time.monotonic(), self.logs / f"{step.name}.log"
        try:
            status = run(step, command, seconds, log)
        finally:  # also when this program is told to end
            lines = log.read_text(errors="replace").splitlines()
            print(*lines[-SHOWN:], sep="\n")
            pack(self.logs, self.archive)
        print(f"== {step.name}: status {status} after {time.monotonic() - start:.0f} s", flush=True)
        if status != int(step.fails):
            self.failed.append(step.name)


def shown(step: Step) -> str:
    words = [f"{name}={value}" for name, value in step.env.items()] + list(map(str, step.command))
    return " ".join(word if "\n" not in word else "..." for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench/cuda.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    of_parts = "; ".join(f"{number}: {what}" for number, what in PARTS.items())
    parser.add_argument("--part", type=int, choices=PARTS, help=f"{of_parts}; all without it")
    parser.add_argument("--dry-run", action="store_true", help="say what would run; run what a CPU can of it")
    parser.add_argument("folder", nargs="?", type=Path, help="build/gpu; build/gpu-dry for a dry run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    work = ROOT / "build" / ("gpu-dry" if options.dry_run else "gpu")
    folder, logs = (options.folder or work).resolve(), work / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    todo = steps(sys.executable, logs, importlib.util.find_spec("xdist") is not None)
    if options.dry_run:
        todo += on_a_cpu(sys.executable, logs)
    failed = []
    for number in [options.part] if options.part else [*PARTS, *([0] if options.dry_run else [])]:
        own = [step for step in todo if step.part == number]
        what = PARTS.get(number, "what a CPU can do")
        print(f"\n=== part {number}: {what}, at most {sum(step.seconds for step in own)} s")
        failed += Part(number, logs, folder, options.dry_run).do(own)
    print("\n== FAILED: " + ", ".join(failed) if failed else "\n== all steps passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
