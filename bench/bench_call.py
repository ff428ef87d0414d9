"""One public Balancer call from topk_ids to slots, on one CPU core: this build and another checkout's, in turns.

Fairness ledger
- Placement: E = 256, 32 replicas, 16 ranks, `eplb` on Zipf 0.8; ids [T, 8] drawn from it, int64. The call is
  `balancer(topk_ids)` of one rank, in inference mode, Python, checks and allocations included.
- own: loads="own". same: tokens="same". Each with policy exact.
- Two processes, one per checkout, alive at the same time; they measure in turns, a slice each, only one at a time.
  Medians of all calls of all slices; least: the fastest call, which a busy machine disturbs least.
- Goals (issue 28): own <= 12 us of 64 tokens, <= 45 us of 4,096, on a quiet core. LOSS: the median misses it, or this
  build is slower than the other.

Usage: python bench/bench_call.py CHECKOUT [--write]    (CHECKOUT: another build of isoload, in place)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

RANKS, EXPERTS, REPLICAS, TOP_K = 16, 256, 32, 8
TOKENS, GOALS = (64, 4096), {64: 12.0, 4096: 45.0}  # microseconds, of own
SLICES, SECONDS = 40, 0.05
HERE = Path(__file__).resolve()


def work() -> None:
    """Measures a slice for each line "kind tokens" on stdin: a line of nanoseconds."""
    import isoload

    torch.set_num_threads(1)
    topology = isoload.Topology(RANKS, 8)
    popularity = 1 / torch.arange(1, EXPERTS + 1) ** 0.8
    placement = isoload.place((popularity * 1e6)[None], topology, (EXPERTS + REPLICAS) // RANKS)
    draw = torch.Generator().manual_seed(1)
    ids = {
        tokens: torch.multinomial(popularity.expand(tokens, -1), TOP_K, generator=draw) for tokens in TOKENS
    }
    group = isoload.LocalGroup(topology)
    group.ranks = (0,)  # one of all, which waits for no other
    calls = {
        "own": isoload.Balancer(placement, group=group, loads="own"),
        "same": isoload.Balancer(placement, tokens="same"),
    }
    with torch.inference_mode():
        for line in sys.stdin:
            kind, tokens = line.split()
            call, rows, samples = calls[kind], ids[int(tokens)], []
            call(rows), call(rows)
            end = time.perf_counter() + SECONDS
            while time.perf_counter() < end:
                start = time.perf_counter_ns()
                call(rows)
                samples.append(time.perf_counter_ns() - start)
            print(json.dumps(samples), flush=True)


def start(checkout: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "python")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(HERE), "--work"], env=environment, cwd=checkout, **pipes)


def measure(builds: dict[str, subprocess.Popen[str]], kind: str, tokens: int) -> dict[str, Any]:
    samples: dict[str, list[int]] = {name: [] for name in builds}
    for _ in range(SLICES):
        for name, build in builds.items():
            assert build.stdin is not None and build.stdout is not None
            build.stdin.write(f"{kind} {tokens}\n")
            build.stdin.flush()
            samples[name] += json.loads(build.stdout.readline())
    row: dict[str, Any] = {"kind": kind, "tokens": tokens, "experts": EXPERTS, "ranks": RANKS}
    for name, of in samples.items():
        row[f"{name}_us"] = float(np.median(of)) / 1e3
        row[f"{name}_least_us"] = min(of) / 1e3
    return row


def main() -> None:
    if sys.argv[1:] == ["--work"]:
        return work()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--write", action="store_true", help="bench/results/bench_call.jsonl")
    options = parser.parse_args()
    from lib.harness import machine, write_results

    told = ["git", "-C", str(options.checkout), "describe", "--always", "--dirty"]
    before = subprocess.run(told, capture_output=True, text=True).stdout.strip()
    builds = {"old": start(options.checkout.resolve()), "new": start(HERE.parents[1])}
    rows = [
        measure(builds, kind, tokens) | {"old_commit": before}
        for kind in ("own", "same")
        for tokens in TOKENS
    ]
    for build in builds.values():
        build.terminate()
    for row in rows:
        print(
            f"{row['kind']}, {row['tokens']} x {TOP_K}: {row['new_us']:.1f} us (least {row['new_least_us']:.1f}), "
            f"before {row['old_us']:.1f} (least {row['old_least_us']:.1f})"
        )
        goal = GOALS[row["tokens"]] if row["kind"] == "own" else np.inf
        if row["new_us"] > min(goal, row["old_us"]):
            print(f"LOSS {row['kind']}, {row['tokens']} tokens: {row['new_us']:.1f} us")
    print(machine())
    if options.write:
        print("written:", write_results("bench_call", rows).name)


if __name__ == "__main__":
    main()
