"""What happens between GPUs, row by row: right or wrong, with times, for 2, 8 or 16 GPUs within ten minutes.

    bench/cluster.sh                      # all GPUs of this machine
    bench/cluster.sh --only borrow_pull   # one row
    bench/cluster.sh --dry-run            # gloo on a CPU, in place of GPUs: what a CPU can do of each row

One process per GPU runs the rows one after the other. A row that raises on some rank is wrong, and its text is the
error. A row that takes longer than its limit is hung: the processes end, and start again with the next row. The table
is printed, and FILE (default: build/cluster.json) has all figures: send this one file back.

Fairness ledger
- right: compared with the same computation on one process (the dense layer, an eager Balancer, what each rank knows
  that it sent); bits for integers and copies of weights, a tolerance by dtype for sums.
- us, GB/s: median over calls, after two warm-up calls; the slowest rank. GB/s counts bytes from other ranks.
- A dry run's times say nothing about GPUs, and are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lib import table
from lib.cluster_rows import ROWS, Skipped, World
from lib.harness import command, machine, network

ROOT = Path(__file__).resolve().parents[1]
HUNG = 75  # exit status of a process whose row took longer than its limit
LIMIT, DRY_LIMIT = 60.0, 120.0  # seconds of a row
SHOWN = 90  # characters of a row in the table; the file has all
ORDER = {name: number for number, name in enumerate(ROWS)}
SGLANG, SGLANG_LIMIT = "sglang", 240.0  # a row of its own processes; seconds
QUESTION = "SGLang with DeepEP on a made model, with isoload and without: the greedy tokens."
ALL = [*ROWS, SGLANG]


def options() -> argparse.Namespace:
    parser = command(__doc__ or "")
    parser.add_argument("--only", default="", metavar="ROW,ROW", help=f"of {', '.join(ALL)}")
    parser.add_argument("--limit", type=float, help=f"seconds of a row; default: {LIMIT:g}, or the row's own")
    parser.add_argument(
        "--dry-run", action="store_true", help="gloo on the CPU; PROCESSES of them, 2 by default"
    )
    parser.add_argument("file", nargs="?", type=Path, help="of the figures; default: build/cluster.json")
    asked = parser.parse_args()
    asked.only = [name for name in asked.only.split(",") if name]
    if unknown := [name for name in asked.only if name not in ALL]:
        parser.error(f"--only must be of {', '.join(ALL)}, got {unknown[0]}")
    if asked.limit is not None and asked.limit <= 0:
        parser.error(f"--limit must be above 0, got {asked.limit:g}")
    asked.file = asked.file or ROOT / "build" / ("cluster-dry.json" if asked.dry_run else "cluster.json")
    return asked


def read(file: Path) -> dict[str, Any]:
    """What is known so far: the machine, and a row for each name."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    return found


def write(file: Path, content: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


# --- the launcher


def launch(asked: argparse.Namespace) -> int:
    """Start the processes of this node until all rows have an outcome; return 0 if no row is wrong or hung."""
    settings = {name: os.environ.get(name, default) for name, default in (("NODES", "1"), ("NODE_RANK", "0"))}
    processes = int(os.environ.get("PROCESSES") or (2 if asked.dry_run else torch.cuda.device_count()))
    if processes < 1 or int(settings["NODES"]) * processes < 2:
        print("bench/cluster.sh needs two GPUs or more; --dry-run runs on a CPU", file=sys.stderr)
        return 2
    first = settings["NODE_RANK"] == "0"
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    asked.file.unlink(missing_ok=True)
    rendezvous = [
        *(
            f"--nnodes={settings['NODES']}",
            f"--node-rank={settings['NODE_RANK']}",
            f"--nproc-per-node={processes}",
        ),
        f"--master-addr={os.environ.get('HEAD', '127.0.0.1')}",
    ]
    words = [
        __file__,
        *(["--dry-run"] if asked.dry_run else []),
        *([f"--only={','.join(asked.only)}"] * bool(asked.only)),
    ]
    words += [f"--limit={asked.limit:g}"] if asked.limit else []
    port = int(os.environ.get("PORT", "29511"))
    paths = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for attempt in range(len(ROWS) + 1):  # a hung row ends all processes; the next start leaves it out
        run = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--master-port={port + attempt}"]
        done = subprocess.run([*run, *words, str(asked.file)], env=env, cwd=ROOT / "bench", check=False)
        if done.returncode == 0:
            break
    if not first:
        return 0
    if not asked.only or SGLANG in asked.only:
        add_sglang(asked, processes, settings["NODES"] == "1")
    found = read(asked.file)
    rows = [found["rows"][name] for name in ALL if name in found["rows"]]
    columns: table.Columns = {
        "row": "{row}",
        "outcome": "{outcome}",
        "what it shows": "{question}",
        "figures": lambda row: row["text"][:SHOWN],
    }
    table.show(f"{found.get('ranks', '?')} ranks, {found.get('device', '?')}", columns, rows)
    print(asked.file)
    wanted = asked.only or ALL
    return int(
        any(found["rows"].get(name, {}).get("outcome") not in ("right", "left out") for name in wanted)
    )


def add_sglang(asked: argparse.Namespace, gpus: int, one_node: bool) -> None:
    """Add the row of a whole engine, which starts processes of its own."""
    content, row = (
        read(asked.file),
        {"row": SGLANG, "question": QUESTION, "outcome": "left out", "figures": {}},
    )
    if asked.dry_run or not one_node or find_spec("sglang") is None:
        row["text"] = "needs the GPUs of one machine and SGLang"
    else:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "lib/cluster_sglang.py", folder, str(gpus)]
            try:
                done = subprocess.run(
                    words,
                    cwd=ROOT / "bench",
                    capture_output=True,
                    text=True,
                    timeout=asked.limit or SGLANG_LIMIT,
                )
                row |= json.loads(done.stdout.splitlines()[-1])
            except subprocess.TimeoutExpired as error:
                row |= {"outcome": "hung", "text": f"longer than {error.timeout:g} s"}
            except (IndexError, ValueError):
                row |= {"outcome": "wrong", "text": f"ended with {done.returncode}: {done.stderr[-1000:]}"}
    content["rows"][SGLANG] = row
    write(asked.file, content)


# --- one of its processes


class Watchdog:
    """Ends this process where a row takes longer than its limit: a collective that hangs cannot be interrupted."""

    def __init__(self, name: str, seconds: float, rank: int, file: Path, content: dict[str, Any]) -> None:
        self._name, self._rank, self._file, self._content = name, rank, file, content
        # Rank 0 first, so that the file has the row before another rank's end takes this process along.
        self._timer = threading.Timer(seconds + (0 if rank == 0 else 5), self._end)
        self._timer.daemon = True
        self._seconds = seconds

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        if self._rank == 0:
            stack = "".join(
                traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])[-3:]
            )
            text = f"longer than {self._seconds:g} s on rank 0; there: {stack}"
            self._content["rows"][self._name] = row_of(self._name, "hung", text, {})
            write(self._file, self._content)
        os._exit(HUNG)


def row_of(name: str, outcome: str, text: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "row": name,
        "question": ROWS[name].question,
        "outcome": outcome,
        "text": text,
        "figures": figures,
    }


def outcome_of(name: str, world: World) -> dict[str, Any]:
    """Run one row on this rank, and return what all ranks together say of it."""
    figures: dict[str, Any] = {}
    error: str | None = None
    skipped: str | None = None
    start = time.monotonic()
    try:
        figures = ROWS[name].run(world)
    except Skipped as reason:
        skipped = str(reason)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    gathered: list[Any] = [None] * world.ranks
    dist.all_gather_object(gathered, (figures, error, skipped), group=world.side)
    errors = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(gathered) if text]
    reasons = [reason for *_, reason in gathered if reason]
    if errors:
        return row_of(name, "wrong", "; ".join(errors)[:2000], {})
    if reasons:
        return row_of(name, "left out", reasons[0], {})
    worst = {key: slowest(key, [found[key] for found, *_ in gathered]) for key in figures}
    worst = {
        key: value for key, value in worst.items() if not (world.dry and key.endswith(("us", "gb_per_s")))
    }
    worst["seconds"] = round(time.monotonic() - start, 2)
    text = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in worst.items()
    )
    return row_of(name, "right", text, worst)


def slowest(key: str, values: Sequence[Any]) -> Any:
    """One figure of all ranks: the largest time, the smallest rate; of others rank 0's."""
    return max(values) if key.endswith("us") else min(values) if key == "gb_per_s" else values[0]


def work(asked: argparse.Namespace) -> None:
    world = World.join(asked.dry_run)
    content = read(asked.file) if world.rank == 0 else {"rows": {}}
    if world.rank == 0:
        content |= (
            machine(world.device.type) | network(dist.get_backend(), world.device) | {"ranks": world.ranks}
        )
        write(asked.file, content)
    known: list[Any] = [list(content["rows"])]
    dist.broadcast_object_list(known, 0, group=world.side)
    for name in asked.only or ROWS:
        if name in known[0] or name not in ROWS:
            continue
        seconds = asked.limit or ROWS[name].limit or (DRY_LIMIT if asked.dry_run else LIMIT)
        with Watchdog(name, seconds, world.rank, asked.file, content):
            row = outcome_of(name, world)
        if world.rank == 0:
            content["rows"][name] = row
            content["rows"] = dict(sorted(content["rows"].items(), key=lambda item: ORDER[item[0]]))
            write(asked.file, content)
            print(f"{name}: {row['outcome']}, {row['text'][:300]}", flush=True)
    dist.barrier(group=world.side)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = options()
    if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
        work(arguments)
    else:
        sys.exit(launch(arguments))
