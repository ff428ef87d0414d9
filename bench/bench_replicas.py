"""Balance by policy on real routing, without shared experts: what exactness and quotas are worth.

Fairness ledger
- Traces, drawn tokens and calibration as in bench_balance.py: the placement (`eplb`) never saw the workload it is
  judged on; gpt-oss-20b has one workload, the first half calibrates.
- exact, lp: quotas; even: equal quotas; lp_sampled, dynamic: the same fractions, drawn for every copy.
- affine5, affine5_sampled: OUR re-implementation of the published five-step affine scaling (published.py): its
  fractions rounded to quotas, and drawn. Where its acceptance test fails it falls back to equal parts, as published.
- `over` is the mean over (layer, batch) of the busiest rank's copies over exact's proved bound; `sampling` = how much
  lp_sampled is above lp, `five steps` = how much affine5 is above exact, `published` = affine5_sampled above exact.
- A few layers and one batch per fold; all figures are counted from routed slots, none is a time.

Usage: python bench/bench_replicas.py --traces FOLDER   (npz files; what is not there is left out and said)
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import published  # noqa: F401  registers affine5 and affine5_sampled
from bench_balance import TRACES, load_trace
from harness import machine, write_results
from isoload.replay.simulate import ReplaySettings, replay

CASES = ((8, 32), (16, 32), (32, 64), (64, 64), (128, 128))  # ranks, replicas of 256 experts
SMALL_CASES = ((8, 8), (16, 16))  # of gpt-oss-20b's 32
TOKENS = (64, 256, 1024, 4096, 16384, 65536)
POLICIES = ("exact", "lp", "lp_sampled", "even", "dynamic", "affine5", "affine5_sampled")


def run(path: Path, ranks: int, replicas: int, tokens: int) -> list[dict[str, Any]]:
    """One cell: a row per policy."""
    trace, calibrate = load_trace(path, tokens)
    settings = ReplaySettings(
        num_ranks=ranks,
        ranks_per_node=8,
        slots_per_rank=(trace.num_experts + replicas) // ranks,
        calibrate=calibrate,
        batch_tokens=tokens,
        max_batches=1,
        policies=POLICIES,
    )
    found = replay(trace, settings)
    where = {"trace": TRACES[path.stem], "ranks": ranks, "replicas": replicas, "tokens": tokens}
    size = {"layers": found.layers, "batches": found.batches}
    return [{**where, **size, **dataclasses.asdict(row)} for row in found.policies]


def print_costs(rows: list[dict[str, Any]], console: Console) -> None:
    """Per trace: how far each policy is over the bound, and what sampling and five steps cost."""
    for name in dict.fromkeys(row["trace"] for row in rows):
        table = Table(title=f"{name}: busiest rank over exact's bound, %")
        headings = ("R + replicas", "tokens", "imbalance of exact", *POLICIES[1:])
        for heading in (*headings, "sampling", "five steps", "published"):
            table.add_column(heading, justify="right")
        mine = [row for row in rows if row["trace"] == name]
        for key in dict.fromkeys((r["ranks"], r["replicas"], r["tokens"]) for r in mine):
            cell = {r["policy"]: r for r in mine if (r["ranks"], r["replicas"], r["tokens"]) == key}
            over = {policy: 1 + cell[policy]["gap_mean"] for policy in POLICIES}
            costs = (over["lp_sampled"] / over["lp"], over["affine5"], over["affine5_sampled"])
            table.add_row(
                f"{key[0]}+{key[1]}",
                str(key[2]),
                f"{cell['exact']['imbalance_mean']:.3f}",
                *(f"{100 * (over[policy] - 1):.2f}" for policy in POLICIES[1:]),
                *(f"{100 * (cost - 1):+.2f}" for cost in costs),
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of npz traces")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=200)
    rows = []
    for stem in TRACES:
        path = arguments.traces / f"{stem}.npz"
        if not path.exists():
            console.print(f"{path} is not there: left out")
            continue
        for ranks, replicas in SMALL_CASES if "gptoss" in stem else CASES:
            for tokens in arguments.tokens:
                rows += run(path, ranks, replicas, tokens)
                print(stem, ranks, replicas, tokens, file=sys.stderr)
    if not rows:
        raise SystemExit(f"{arguments.traces} holds none of {', '.join(TRACES)}")
    print_costs(rows, console)
    console.print(machine())
    if not arguments.no_write:
        console.print(f"written: {write_results('bench_replicas', rows)}")


if __name__ == "__main__":
    main()
