"""How near `plan_own`'s split of one rank's copies is to the least sum of squares, on recorded routing.

Fairness ledger
- Traces, dealings, placements (`eplb`), ranks and tokens of `bench_loads`; of every setting one step, four layers and
  two source ranks, without targets.
- A split has an improving move where one copy can go to another replica of its expert, or a chain of such moves can
  take one copy from rank u to rank v, so that a sum of squares over the ranks falls. A split without such a move has
  the least sum. There are two sums: of whole copies; and of copies and the op's rotation, which the op minimises, and
  which falls by the smallest fraction, too.
- The bound is `plan_exact`'s of the source's own copies: its peak is the least there is.

Usage: python bench/bench_own_split.py [--traces FOLDER] [--write]    (without a folder: the shipped trace alone)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench_loads import LAYERS, RANKS, TOKENS, ByCounts, ByToken, Setting, streams
from isoload import ops
from lib.harness import command, write_results

SOURCES = 2
ONE = 2**32
ROTATION = (0xC13FA9A9, 0x91E10DA6, 0x61C88647)  # per source, rank and layer: own_rotation in plan_own.h


def rotation(source: int, ranks: int, layer: int) -> NDArray[np.int64]:
    """[R] in 2^-32 copies."""
    of_source, of_rank, of_layer = ROTATION
    return (source * of_source + np.arange(ranks) * of_rank + layer * of_layer) % ONE


def reachable(sent: NDArray[Any], slot_to_expert: NDArray[Any], ranks: int) -> NDArray[np.bool_]:
    """[R, R] whether moves of one copy each, to other replicas of their experts, take a copy from rank to rank."""
    num_experts, size = int(slot_to_expert.max()) + 1, len(slot_to_expert) // ranks
    gives, takes = (np.zeros((ranks, num_experts), dtype=bool) for _ in "ab")
    for slot, expert in enumerate(slot_to_expert):
        if expert >= 0:
            takes[slot // size, expert] = True
            gives[slot // size, expert] |= sent[slot] > 0
    steps = (gives.astype(np.int64) @ takes.T.astype(np.int64)) > 0
    for middle in range(ranks):  # Warshall's closure
        steps |= steps[:, middle : middle + 1] & steps[middle]
    return steps


def improvable(
    sent: NDArray[Any], slot_to_expert: NDArray[Any], base: NDArray[np.int64]
) -> tuple[bool, bool]:
    """Whether a move, or a chain of moves, lowers the sum of squares of the copies [P] sent to ranks, in whole copies;
    and of these and base [R]."""
    whole = sent.reshape(len(base), -1).sum(1).astype(np.int64) * ONE
    can = reachable(sent, slot_to_expert, len(base))
    first, second = (bool((can & (x[:, None] - x[None] > ONE)).any()) for x in (whole, whole + base))
    return first, second


def judge(name: str, dealing: str, stream: ByToken | ByCounts, ranks: int, tokens: int) -> dict[str, Any]:
    setting = Setting(stream.all, ranks, tokens)
    loads = torch.from_numpy(next(stream.steps(ranks, tokens, np.random.default_rng(tokens))))
    slots, falls, above = setting.slots.numpy(), [], []
    for source in range(SOURCES):
        own = loads[:, source].contiguous()
        sent = ops.plan_own(own, setting.tables, setting.none, source)
        above += (torch.from_numpy(setting.peak(sent)) - ops.plan_exact(own, setting.tables).bound).tolist()
        for layer in range(LAYERS):
            base = rotation(source, ranks, layer)
            falls.append(improvable(sent[layer].numpy(), slots[layer], base))
    return {
        "trace": name,
        "dealing": dealing,
        "ranks": ranks,
        "tokens": tokens,
        "splits": len(above),
        "improvable": sum(whole for whole, _ in falls),
        "improvable_with_rotation": sum(turned for _, turned in falls),
        "above_bound": int(np.count_nonzero(above)),
        "most_above": int(max(above)),
    }


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of npz traces")
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        judge(name, dealing, stream, ranks, tokens)
        for name, dealing, stream in streams(asked.traces)
        if dealing != "turned"
        for ranks in RANKS
        if ranks <= max(32, stream.num_experts // 4)
        for tokens in TOKENS
    ]
    keys = ("splits", "improvable", "improvable_with_rotation", "above_bound")
    total = {key: sum(row[key] for row in rows) for key in keys}
    print(
        f"{total['improvable']} of {total['splits']} splits have an improving move in whole copies, "
        f"{total['improvable_with_rotation']} with the rotation; the peak is above its bound in "
        f"{total['above_bound']}, by at most {max(row['most_above'] for row in rows)} copies"
    )
    if asked.write:
        print(write_results("bench_own_split", rows))


if __name__ == "__main__":
    main()
