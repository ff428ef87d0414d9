"""What filling spare slots ahead costs: one op call for one layer, on one core.

Fairness ledger
- 8 ranks with 32 of 256 experts in order and 8 spare slots each; 4096 copies per source rank, drawn from Zipf
  popularity of exponent 0.4, 0.8 and 1.2, four of each. The median of every instance; of these the median, the largest.
- fill of hedge: its two ops, one after the other. Linear: the loads of two layers, sums over sources. top_up: on the
  slots that plan_fill filled.
- goal: what this repository asks of itself; a median above it is marked LOSS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload import ops
from isoload.balancing import prediction
from isoload.placement.placed_layers import PlacedLayers
from lib.harness import begin, measure, write_results

RANKS, EXPERTS, SPARE, COPIES = 8, 256, 8, 4096
GOALS = {"fill of hedge": 40, "Linear, sums": 40, "top_up": 15}


def op_calls(loads: Tensor, placed: PlacedLayers) -> dict[str, Callable[[], Any]]:
    """Of loads [R, E]."""
    slots, homes, sums = placed.slot_to_expert, placed.home_slot, loads.sum(0, dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    linear = prediction.Linear(
        [torch.randint(-(2**16), 2**16, (2, EXPERTS, EXPERTS), generator=draw).double()]
    )
    room = {"num_ranks": RANKS, "spare_slots": SPARE}
    level = ops.plan_fill(sums, slots, homes, **room).slot_to_expert
    return {
        "fill of hedge": lambda: ops.top_up(
            sums, ops.plan_fill(sums, slots, homes, **room).slot_to_expert, homes, **room
        ),
        "Linear, sums": lambda: linear.predict(0, [sums, sums]),
        "top_up": lambda: ops.top_up(sums, level, homes, **room),
    }


def times(instances: int = 4, seconds: float = 0.1) -> list[dict[str, Any]]:
    draw, found = np.random.default_rng(0), {name: [] for name in GOALS}
    size = EXPERTS // RANKS + SPARE
    placement = isoload.place(
        np.ones((1, EXPERTS)), isoload.Topology(RANKS), size, "trivial", spare_slots=SPARE
    )
    for exponent in (0.4, 0.8, 1.2):
        for _ in range(instances):
            share = draw.permutation(1 / np.arange(1, EXPERTS + 1) ** exponent)
            loads = torch.tensor(draw.multinomial(COPIES, share / share.sum(), RANKS), dtype=torch.int32)
            for name, call in op_calls(loads, placement.layer(0, "cpu")).items():
                found[name].append(measure(call, seconds=seconds).median)
    shape = {"ranks": RANKS, "experts": EXPERTS, "spare": SPARE}
    return [
        {"op": name, **shape, "us": float(np.median(us)), "slowest_us": max(us), "goal_us": GOALS[name]}
        for name, us in found.items()
    ]


def main() -> None:
    begin(__doc__)
    rows = times()
    for row in rows:
        loss = "" if row["us"] <= row["goal_us"] else "  LOSS"
        print(
            f"{row['op']:17} {row['us']:6.1f} us, {row['slowest_us']:6.1f} at most, goal {row['goal_us']}{loss}"
        )
    print("written:", write_results("bench_ahead", rows))


if __name__ == "__main__":
    main()
