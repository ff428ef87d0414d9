"""`make papers`: computes the five papers' figures that a CPU can have, and renders the tables of
bench/paper_tables.md and docs/papers.md.

Fairness ledger
- Theirs: as printed. Here: counts, plans and imbalance, which other work on the machine does not change; no wall time
  without --times. The paper's traces are nobody's: the text, and often the model, is another one, as each row says.
- Placed by the first half of a trace and judged on the second, or by other workloads; lib/paper_jobs.py has each job.
- A job whose traces are not in --traces is left out and named; its row keeps the figures of results/papers.jsonl.
- GPUs: rows whose figure needs them have the command, the paper's figure, and an empty cell.

Usage: python bench/papers.py [--only JOB ...] [--traces FOLDER] [--times]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lib.harness import command, read_results, write_results
from lib.paper_jobs import JOBS
from lib.trace_files import add_traces, missing
from tables import ROOT, renew

PAGES = (ROOT / "bench" / "paper_tables.md", ROOT / "docs" / "papers.md")
WIDTH = 30


def run(name: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return JOBS[name].run(folder)


def runnable(names: list[str], folder: Path, times: bool) -> Iterator[str]:
    for name in names:
        absent = [trace for trace in JOBS[name].traces if not (folder / f"{trace}.npz").exists()]
        if absent:
            print(f"{name} is left out: {missing(absent)}")
        elif JOBS[name].timed and not times:
            print(f"{name} is left out: it measures wall time, which --times takes on an idle machine")
        else:
            yield name


def bar(done: int, total: int, name: str, start: float) -> None:
    filled = "#" * (WIDTH * done // max(total, 1))
    text = f"[{filled:<{WIDTH}}] {done} of {total}, {time.monotonic() - start:.0f} s, {name}"
    print(
        f"\r{text:<100}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True
    )


def compute(names: list[str], folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Figures of the jobs, over processes; jobs of wall time alone at the end. A job that fails is named on stderr."""
    found: dict[str, dict[str, Any]] = {}
    start = time.monotonic()
    counted = [name for name in names if not JOBS[name].timed and processes > 1]
    with ProcessPoolExecutor(
        processes, get_context("spawn")
    ) as pool:  # starts processes for submitted jobs alone
        running = {pool.submit(run, name, folder): name for name in counted}
        for future in as_completed(running):
            if error := future.exception():
                print(f"{running[future]} failed: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            found[running[future]] = future.result()
            bar(len(found), len(names), running[future], start)
    for name in names:
        if name not in counted:
            found[name] = run(name, folder)
            bar(len(found), len(names), name, start)
    print()
    return found


def main() -> int:
    parser = command(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=JOBS, metavar="JOB", help="these jobs; others keep their figures"
    )
    parser.add_argument("--times", action="store_true", help="also measure wall time, on an idle machine")
    parser.add_argument("--processes", type=int, default=2, help="jobs at the same time")
    add_traces(parser)
    asked = parser.parse_args()
    names = list(runnable(asked.only or list(JOBS), asked.traces, asked.times))
    if asked.only and not names:
        return 1
    found = compute(names, asked.traces, asked.processes)
    kept = {row["job"]: row for row in read_results("papers") if row["job"] in JOBS}
    rows = kept | {name: {"job": name, "figures": figures} for name, figures in found.items()}
    print(write_results("papers", [rows[name] for name in JOBS if name in rows]))
    for page in PAGES:
        text, _, changed = renew(page.read_text(), page.name)
        page.write_text(text)
        names = ", ".join(changed)
        print(f"{page.relative_to(ROOT)}: {len(changed)} tables changed{': ' * bool(changed)}{names}")
    for name in found if asked.only else ():
        print(name, found[name])
    return int(len(found) < len(names))


if __name__ == "__main__":
    sys.exit(main())
