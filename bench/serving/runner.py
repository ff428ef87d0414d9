"""Cells of serving benches: an engine is started, driven by its own load generator, stopped; a row of JSON is left.

A cell is one start of SGLang and the loads that it serves, one after the other. What it needs is data (:class:`Cell`),
how it runs is alike for all. A cell that fails leaves its error and the loads that it had served, and the next begins.
Nothing here imports SGLang: `--launcher` and `--generator` are command lines.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_dispatch import positive
from lib.harness import RESULTS, ResultFile, command, machine, read_results

Row = dict[str, Any]
Words = tuple[str, ...]
HOST, STOP_SECONDS = "127.0.0.1", 60
RECORDED = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
ATTACH = {"ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1"}
ATTACHED = (
    "isoload: attached to SGLang's"  # of the log; where isoload is not installed the engine says nothing
)
FIGURES = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "total_throughput",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2e_latency_ms", "concurrency",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """One run of the load generator. Without `kept` it warms up, and nothing of it is in the row."""

    name: str
    prompts: int
    flags: Words
    kept: bool = True


@dataclass(frozen=True)
class Cell:
    """One start of the engine.

    name: as in `--only`; flags: the engine's, beside those that all cells share; about: fields of its row; variables:
    of the engine's environment, which has none of isoload's but these; says: words of lines that the engine's log must
    have, since options that do not apply to a model are passed over without one; needs: a file that must be there;
    before: command lines that run ahead of the engine; records: where its counts of experts in these loads go.
    """

    name: str
    flags: Words
    loads: tuple[Load, ...]
    about: Row
    variables: dict[str, str]
    says: tuple[Words, ...] = ()
    needs: Path | None = None
    before: tuple[Words, ...] = ()
    records: Path | None = None


def options(ledger: str, model: str, name: str) -> argparse.ArgumentParser:
    """Of all scripts in this folder."""
    parser = command(ledger)
    parser.add_argument("--model", default=model, help="path or name, as the engine takes it")
    parser.add_argument(
        "--gpus", type=positive, default=8, help="ranks of attention and of experts, of all nodes"
    )
    parser.add_argument(
        "--nnodes", type=positive, default=1, help="nodes; start the lines of --dry-run on the others"
    )
    parser.add_argument(
        "--node-rank", type=int, default=0, help="with --dry-run: the node whose lines are printed"
    )
    parser.add_argument("--dist-init-addr", default="", metavar="HOST:PORT", help="of node 0, with --nnodes")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines of chat requests, instead of random token ids"
    )
    parser.add_argument("--record-prompts", type=Path, help="the same for the placements; other requests")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="these alone; * matches")
    parser.add_argument("--resume", action="store_true", help="leave out cells whose row has no error")
    parser.add_argument("--dry-run", action="store_true", help="print every command line; start nothing")
    parser.add_argument("--engine-args", default="", help="more flags of the engine, after the cell's")
    parser.add_argument("--launcher", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--generator", default=f"{sys.executable} -m sglang.bench_serving")
    parser.add_argument("--port", type=positive, default=30000)
    parser.add_argument("--limit", type=positive, default=3600, help="seconds of a start, and of a load")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows and the picture")
    parser.add_argument("--work", type=Path, default=Path("build") / name, help="of logs and placements")
    return parser


def launch_line(cell: Cell, asked: argparse.Namespace) -> list[str]:
    """Attention data-parallel, experts over all ranks, rows by DeepEP."""
    ranks = str(asked.gpus)
    shared = (
        "--model-path", asked.model, "--tp-size", ranks, "--dp-size", ranks, "--ep-size", ranks,
        "--enable-dp-attention", "--moe-a2a-backend", "deepep", "--trust-remote-code", "--host", HOST,
        "--port", str(asked.port),
    )  # fmt: skip
    nodes: Words = ()
    if asked.nnodes > 1:
        nodes = ("--nnodes", str(asked.nnodes), "--node-rank", str(asked.node_rank))
        nodes += ("--dist-init-addr", asked.dist_init_addr)
    more = shlex.split(asked.engine_args)  # argparse takes the last of two, so these win
    return [*shlex.split(asked.launcher), *shared, *nodes, *cell.flags, *more]


def load_line(load: Load, asked: argparse.Namespace, out: Path) -> list[str]:
    """Every load begins with an empty prefix cache."""
    shared = (
        "--host", HOST, "--port", str(asked.port), "--model", asked.model, "--num-prompts", str(load.prompts),
        "--flush-cache", "--disable-tqdm", "--output-file", str(out),
    )  # fmt: skip
    return [*shlex.split(asked.generator), *shared, *load.flags]


def prompt_flags(file: Path | None, tokens: int, new: int, seed: int) -> Words:
    """Prompts of a load: requests of a file from its first on; else ids that follow one another, of exact length."""
    if file is not None:
        chat = "--backend", "sglang-oai-chat", "--dataset-name", "openai", "--dataset-path", str(file)
        return (*chat, "--sharegpt-output-len", str(new), "--seed", str(seed))
    ids = "--backend", "sglang", "--dataset-name", "random-ids", "--tokenize-prompt"
    lengths = "--random-range-ratio", "1", "--random-input-len", str(tokens), "--random-output-len", str(new)
    return (*ids, *lengths, "--seed", str(seed))


def recording(asked: argparse.Namespace, load: Load) -> Cell:
    """The first cell: SGLang as it is. All placements are made of the experts that it counts."""
    steps = "--expert-distribution-recorder-mode", "stat", "--expert-distribution-recorder-buffer-size", "-1"
    flags = (*steps, "--deepep-mode", "normal")  # with `auto` SGLang's recorder raises
    variables = {RECORDED: str(asked.work / "recorded")}
    return Cell("record", flags, (load,), {}, variables, records=recorded(asked))


def recorded(asked: argparse.Namespace) -> Path:
    return Path(asked.work / "expert_counts.pt")


def choose(cells: Sequence[Cell], asked: argparse.Namespace, done: Sequence[Row]) -> list[Cell]:
    """Those of `--only` and `--resume`."""
    names = [cell.name for cell in cells]
    for pattern in asked.only or ():
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"--only must name cells of {', '.join(names)}, got {pattern!r}")
    right = {row["cell"] for row in done if row["error"] is None and asked.resume}
    wanted = {name for pattern in asked.only or ["*"] for name in fnmatch.filter(names, pattern)} - right
    if "record" in wanted and asked.prompts and asked.record_prompts in (None, asked.prompts):
        raise ValueError(f"--record-prompts must be another file than --prompts, got {asked.record_prompts}")
    return [cell for cell in cells if cell.name in wanted]


def output_of(cell: Cell, load: Load, asked: argparse.Namespace) -> Path:
    return Path(asked.work / f"{cell.name}.{load.name}.jsonl".replace("/", "_").replace(" ", "_"))


def dry_run(cells: Sequence[Cell], asked: argparse.Namespace) -> None:
    """Every command line in order, as a shell would take it, with the variables that are set."""
    for cell in cells:
        print(f"# {cell.name}", *map(shlex.join, cell.before), sep="\n")
        variables = [f"{name}={shlex.quote(value)}" for name, value in cell.variables.items()]
        print(*variables, shlex.join(launch_line(cell, asked)))
        for load in cell.loads:
            print(shlex.join(load_line(load, asked, output_of(cell, load, asked))))


def run(name: str, cells: Sequence[Cell], asked: argparse.Namespace, draw: Callable[[list[Row]], str]) -> int:
    """Runs the chosen cells, keeps the rows of the others, draws the picture; 1 where a cell failed, else 0."""
    if asked.nnodes > 1 and not asked.dist_init_addr:
        raise SystemExit("--dist-init-addr must be HOST:PORT of node 0 with --nnodes above 1")
    if asked.node_rank and not asked.dry_run:
        raise SystemExit("--node-rank above 0 needs --dry-run: start its lines there, node 0 sends the loads")
    done = read_results(name, asked.results)
    chosen = choose(cells, asked, done)
    if asked.dry_run:
        dry_run(chosen, asked)
        return 0
    asked.work.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = ResultFile(name, device, asked.results)
    for row in done:
        if row["cell"] not in [cell.name for cell in chosen]:
            results.add(row)
    where = {"device": machine(device)["device"].removesuffix(", 1 thread"), "gpus": asked.gpus}
    failed = False
    for cell in chosen:
        row = run_cell(cell, asked)
        failed |= row["error"] is not None
        results.add(row | where)
        print(f"{cell.name}: {row['error'] or 'done'}", file=sys.stderr)
    picture = results.path.with_suffix(".svg")
    picture.write_text(draw(read_results(name, asked.results)))
    print(f"written: {results.path}, {picture}")
    return int(failed)


def run_cell(cell: Cell, asked: argparse.Namespace) -> Row:
    """Its row: command lines as they ran, the figures of each load, and why it ended where it did not go well."""
    launch = launch_line(cell, asked)
    row: Row = {"cell": cell.name, **cell.about, "model": asked.model, "variables": cell.variables}
    row |= {"before": [shlex.join(line) for line in cell.before], "launch": shlex.join(launch)}
    row |= {"sglang": None, "cache_tokens": None, "seconds_to_start": None, "loads": [], "error": None}
    try:
        if cell.needs is not None and not cell.needs.exists():
            raise RuntimeError(f"{cell.needs} is not there: cell record makes it")
        for line in cell.before:
            finish(line, asked.work / "before.log", asked.limit)
        if cell.records:
            cell.records.unlink(missing_ok=True)
            shutil.rmtree(cell.variables[RECORDED], ignore_errors=True)
        with engine(cell, launch, asked) as row["seconds_to_start"]:
            serve(cell, asked, row)
    except Exception as error:  # whatever it is: its row and the exit status say so, and the next cell begins
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def serve(cell: Cell, asked: argparse.Namespace, row: Row) -> None:
    """All loads of a started engine; figures are in the row as soon as they are known."""
    if cell.records:
        call(asked, "start_expert_distribution_record", "POST")
    for load in cell.loads:
        out = output_of(cell, load, asked)
        out.unlink(missing_ok=True)  # the generator appends
        line = load_line(load, asked, out)
        finish(line, out.with_suffix(".log"), asked.limit)
        found = json.loads(out.read_text())
        engine_says = found["server_info"]
        row["sglang"], row["cache_tokens"] = engine_says["version"], engine_says["max_total_num_tokens"]
        if found["completed"] != load.prompts:
            raise RuntimeError(f"{load.name}: {found['completed']} of {load.prompts} requests completed")
        if load.kept:
            figures = {name: found[name] for name in FIGURES}
            row["loads"].append({"load": load.name, "command": shlex.join(line), **figures})
    if cell.records:
        call(asked, "dump_expert_distribution_record", "POST")
        files = sorted(Path(cell.variables[RECORDED]).glob("*.pt"))
        if len(files) != 1:
            raise RuntimeError(
                f"the engine must record one file, got {len(files)} in {cell.variables[RECORDED]}"
            )
        shutil.copyfile(files[0], cell.records)


@contextmanager
def engine(cell: Cell, launch: Sequence[str], asked: argparse.Namespace) -> Iterator[float]:
    """Seconds that it took until it was healthy. In a session of its own, so that all of its processes end with it."""
    if healthy(asked):  # that one would be measured
        raise RuntimeError(f"--port must be free, got {asked.port}, where a server answers")
    log, start = asked.work / f"{cell.name.replace('/', '_')}.log", time.monotonic()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ISOLOAD_")}
    with log.open("w") as said:
        process = subprocess.Popen(
            launch, env=kept | cell.variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not healthy(asked):
            if process.poll() is not None:
                raise RuntimeError(f"the engine ended with status {process.returncode}: {tail(log)}")
            if time.monotonic() > start + asked.limit:
                raise RuntimeError(f"the engine was not healthy after {asked.limit} s: {tail(log)}")
            time.sleep(0.2)
        lines = log.read_text(errors="replace").splitlines()
        for words in cell.says:
            if not any(all(word in line for word in words) for line in lines):
                raise RuntimeError(f"the engine's log must have a line with {' ... '.join(words)}: {log}")
        yield time.monotonic() - start
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Waits until none of the engine's processes is left: their memory on the GPUs is free only then."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(line: Sequence[str], log: Path, seconds: float) -> None:
    """Runs a command to its end."""
    with log.open("w") as said:
        status = subprocess.run(line, stdout=said, stderr=subprocess.STDOUT, timeout=seconds).returncode
    if status:
        raise RuntimeError(f"status {status} of {shlex.join(line)}: {tail(log)}")


def tail(log: Path, characters: int = 2000) -> str:
    return log.read_text(errors="replace")[-characters:].strip()


def healthy(asked: argparse.Namespace) -> bool:
    try:
        call(asked, "health", "GET")
    except OSError:  # refused, reset, timed out, or the status of an engine that is still loading
        return False
    return True


def call(asked: argparse.Namespace, path: str, method: str) -> None:
    urlopen(Request(f"http://{HOST}:{asked.port}/{path}", method=method), timeout=60).close()
