"""plan_replication: Libra's Algorithm 1 (papers/004), as printed and repaired."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.results import SlotFill
from reference.spare_fill import SpareFill, fixed_copies, pick


def plan_replication(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    local_slots: int = 0,
    printed: bool = False,
) -> SlotFill:
    """The fill of isoload.ops.plan_replication, which documents the arguments."""
    if slot_to_expert.dim() == 2:
        layers = [
            plan_replication(
                loads[i], slot_to_expert[i], home_slot[i], num_ranks, spare_slots, pick(fixed, i), alive=alive,
                ranks_per_node=ranks_per_node, local_slots=local_slots, printed=printed,
            )
            for i in range(len(slot_to_expert))
        ]  # fmt: skip
        return SlotFill(*(torch.stack(field) for field in zip(*layers, strict=True)))
    fill = SpareFill(slot_to_expert, home_slot, num_ranks, spare_slots, alive)
    wanted, besides = loads.tolist(), fixed_copies(fixed, num_ranks)
    take_local(fill, wanted, local_slots)
    mean = -(-(sum(map(sum, wanted)) + sum(besides)) // sum(fill.alive))
    for _ in range((spare_slots - local_slots) * num_ranks):
        pair = next_handover(fill, wanted, besides, mean, printed)
        if pair is None:
            break
        fill.place(*pair)
    return fill.result(ranks_per_node)


def take_local(fill: SpareFill, wanted: list[list[int]], count: int) -> None:
    """Every rank takes the remote experts that it asks for most."""
    for rank, row in enumerate(wanted):
        remote = [e for e, copies in enumerate(row) if copies > 0 and e not in fill.held[rank]]
        for expert in sorted(remote, key=lambda e: (-row[e], e))[: min(count, len(fill.empty(rank)))]:
            fill.place(rank, expert)


def rank_loads(fill: SpareFill, wanted: list[list[int]], besides: list[int]) -> list[int]:
    """A copy is computed where it is from, if its expert is there, else at its expert's home."""
    load = list(besides)
    for source, row in enumerate(wanted):
        for expert, copies in enumerate(row):
            load[source if expert in fill.held[source] else fill.owner(expert)] += copies
    return load


def next_handover(
    fill: SpareFill, wanted: list[list[int]], besides: list[int], mean: int, printed: bool
) -> tuple[int, int] | None:
    """(rank, expert) that is borrowed next."""
    load = rank_loads(fill, wanted, besides)
    remote = [
        sum(row[e] for row, held in zip(wanted, fill.held, strict=True) if e not in held)
        for e in range(len(fill.home))
    ]
    for giver in sorted(range(fill.num_ranks), key=lambda r: (-load[r], r)):
        if load[giver] <= mean:
            return None
        own = [e for e in range(len(fill.home)) if fill.owner(e) == giver and remote[e] > 0]
        for expert in sorted(own, key=lambda e: (-remote[e], fill.home[e])):
            taker = fill.taker(expert, load, fill.num_ranks)
            if taker is not None and load[taker] + wanted[taker][expert] <= mean:
                return taker, expert
            if printed:
                return None
        if printed:
            return None
    return None
