"""Moves between fresh placements: how long the ranks of a layer are busy, beside the busiest rank's own rows.

Fairness ledger
- Placements: `eplb` of two independent draws of 256 loads (Pareto, shape 1.5), 10 layers, on 8, 16, 32 and 64 ranks
  with 32 or 64 replicas. With --traces also DeepSeek-V3 and GLM-5.2: eplb of their first batch and of the middle one.
- Chunks are those of `load_placement`: R rows at most, all reads before all writes. Time counts expert rows: the sum
  over chunks of what the busiest rank sends or receives, as links that work in both directions do it.
- "own_rows" is the busiest rank's number of rows over all chunks: no order of the same moves takes less time. "least"
  is the number of rows that must arrive on one rank: no choice of sources takes less either.
- "in_flight" is the most rows that a rank sends or receives in one chunk of any layer.
- "goal" is 1.3 of own rows in the mean of the layers; a row above it is marked LOSS. No row travels here.

Usage: python bench/bench_moves.py [--traces FOLDER] [--write]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoload
from isoload.weights.layout import Move, keep_rows
from isoload.weights.schedule import plan_moves
from lib import table
from lib.harness import command, write_results
from lib.trace_files import need

SHAPES = ((8, 36), (16, 18), (32, 9), (64, 5))  # ranks, rows of each
FILES = ("dsv3_sglang_longin", "glm52_domains_a")
LAYERS, EXPERTS, GOAL = 10, 256, 1.3
Rows = list[list[int]]


def loads(folder: Path | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, loads before and after [L, E]."""
    draw = np.random.default_rng(0)
    yield "drawn", draw.pareto(1.5, (LAYERS, EXPERTS)) + 0.1, draw.pareto(1.5, (LAYERS, EXPERTS)) + 0.1
    for name in FILES if folder else ():
        assert folder is not None
        (trace,) = need(folder, name)
        counts = trace.batch_counts()
        some = np.linspace(0, counts.shape[1] - 1, LAYERS).astype(int)
        yield name, counts[0, some], counts[len(counts) // 2, some]


def busiest(moves: list[Move]) -> int:
    """Rows that the busiest rank sends or receives."""
    sent = Counter(m.source.rank for m in moves if m.source.rank != m.target.rank)
    received = Counter(m.target.rank for m in moves if m.source.rank != m.target.rank)
    return max([*sent.values(), *received.values()], default=0)


def arrivals(current: Rows, wanted: Rows) -> int:
    """Rows that must arrive on the rank that lacks most experts."""
    return max(len(set(new) - set(old)) for old, new in zip(current, wanted, strict=True))


def bench(name: str, before: np.ndarray, after: np.ndarray, ranks: int, size: int) -> dict[str, Any]:
    topology = isoload.Topology(ranks)
    slots = [isoload.place(load, topology, size, "eplb").slot_to_expert for load in (before, after)]
    layers = []
    for current, new in zip(*(of.reshape(-1, ranks, size).tolist() for of in slots), strict=True):
        wanted = [keep_rows(held, [], sorted(experts)) for held, experts in zip(current, new, strict=True)]
        chunks = plan_moves(current, wanted, ranks)
        layers.append(
            {
                "rows": sum(map(len, chunks)),
                "chunks": len(chunks),
                "time": sum(map(busiest, chunks)),
                "own_rows": busiest([move for chunk in chunks for move in chunk]),
                "least": arrivals(current, wanted),
                "in_flight": max(map(busiest, chunks)),
            }
        )
    found = {key: float(np.mean([layer[key] for layer in layers])) for key in layers[0]}
    found["in_flight"] = max(layer["in_flight"] for layer in layers)
    ratio = found["time"] / found["own_rows"]
    where = {"loads": name, "ranks": ranks, "rows_of_a_rank": size}
    return {**where, **found, "of_own_rows": ratio, "goal": GOAL, "met": ratio <= GOAL}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of npz traces")
    parser.add_argument("--write", action="store_true", help="bench/results/bench_moves.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [bench(*of, *shape) for of in loads(arguments.traces) for shape in SHAPES]
    table.show_rows("", rows, "")
    table.losses(rows)
    if arguments.write:
        print(write_results("bench_moves", rows))


if __name__ == "__main__":
    main()
