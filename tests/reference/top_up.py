"""top_up: spare slots that are still empty take the experts with most copies per replica."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from isoload.ops.results import SlotFill
from reference.spare_fill import SpareFill, fixed_copies, pick

ONE = 2**16  # a copy, in fixed point


def top_up(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    within: Literal["all", "node"] = "all",
) -> SlotFill:
    """The fill of isoload.ops.top_up, which documents the arguments."""
    if slot_to_expert.dim() == 2:
        layers = [
            top_up(
                loads[i], slot_to_expert[i], home_slot[i], num_ranks, spare_slots, pick(fixed, i), alive=alive,
                ranks_per_node=ranks_per_node, within=within,
            )
            for i in range(len(slot_to_expert))
        ]  # fmt: skip
        return SlotFill(*(torch.stack(field) for field in zip(*layers, strict=True)))
    fill = SpareFill(slot_to_expert, home_slot, num_ranks, spare_slots, alive)
    totals = loads.reshape(-1, len(fill.home)).sum(0).tolist()
    besides = fixed_copies(fixed, num_ranks)

    def part(expert: int) -> int:
        """Its copies per replica."""
        return int(totals[expert]) * ONE // max(1, sum(expert in held for held in fill.held))

    full: set[int] = set()
    while any(fill.empty(r) for r in range(num_ranks)):
        expert = max((e for e in range(len(totals)) if e not in full), key=lambda e: (part(e), -e), default=0)
        if expert in full or part(expert) == 0:
            break
        load = [besides[r] * ONE + sum(part(e) for e in held) for r, held in enumerate(fill.held)]
        taker = fill.taker(expert, load, (ranks_per_node if within == "node" else None) or num_ranks)
        if taker is None:
            full.add(expert)
        else:
            fill.place(taker, expert)
    return fill.result(ranks_per_node)
