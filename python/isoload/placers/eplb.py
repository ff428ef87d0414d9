"""Placer ``eplb``: the global policy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), all layers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isoload.placers.base import Loads, Placer, Slots

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class EplbPlacer(Placer):
    """One replica of every expert, the rest where replicas are heaviest; packed the heaviest first.

    Plans for the loads summed over batches. Slots of a rank are in the order in which they were filled.

    Options:
        dedup: never two replicas of one expert on one rank, so at most R replicas of each. False gives the
            published maps exactly (where experts tie: those of the published code under a stable sort).

    Raises:
        ValueError: with ``dedup``, if a rank has more slots than there are experts.
    """

    name = "eplb"
    dedup: bool = True

    def place(self, loads: Loads, num_ranks: int, slots_per_rank: int) -> Slots:
        # float32 from here on, because the published code is: other roundings break its near-ties otherwise.
        weight = loads.sum(0).astype(np.float32)
        num_slots, experts = num_ranks * slots_per_rank, weight.shape[1]
        if self.dedup and slots_per_rank > experts:
            raise ValueError(
                f"slots_per_rank must be at most {experts} besides spare slots, one for each expert "
                f"(dedup=False repeats experts), got {slots_per_rank}"
            )
        replicas, part = replicate(weight, num_slots, most=num_ranks if self.dedup else num_slots)
        if slots_per_rank == 1:
            return replicas.astype(np.int32)  # nothing to pack; the published order
        return pack(replicas, part, num_ranks, self.dedup)


def replicate(loads: Floats, num_replicas: int, most: int) -> tuple[Ints, Floats]:
    """One replica each, then one more for the expert whose replicas are heaviest (ties: lowest id).

    Minimises the heaviest replica. Loads [L, E], at most ``most`` replicas of an expert.

    Returns:
        replicas [L, num_replicas] expert of each, as they were made; part [L, E] load of one replica.
    """
    layers, experts = loads.shape
    rows = np.arange(layers)
    replicas = np.empty((layers, num_replicas), dtype=np.int64)
    replicas[:, :experts] = np.arange(experts)
    copies = np.ones_like(loads)
    part = loads.copy()  # -1 once an expert may not get more
    for j in range(experts, num_replicas):
        expert = part.argmax(1)
        replicas[:, j] = expert
        copies[rows, expert] += 1
        n = copies[rows, expert]
        part[rows, expert] = np.where(n < most, loads[rows, expert] / n, -1)
    return replicas, loads / copies


def pack(replicas: Ints, part: Floats, num_ranks: int, dedup: bool) -> Slots:
    """Heaviest replica first (ties: as made) onto the rank with the least load that has room (ties: lowest).

    Args:
        replicas: [L, P] expert of each replica.
        part: [L, E] load of one replica of each expert.
        num_ranks: R, divides P; each rank takes P/R replicas.
        dedup: a rank that holds the expert already has no room for it.

    Returns:
        [L, P] expert in each slot.
    """
    (layers, num_slots), experts = replicas.shape, part.shape[1]
    rows, size = np.arange(layers), num_slots // num_ranks
    order = np.argsort(-np.take_along_axis(part, replicas, 1), axis=1, kind="stable")
    replicas = np.take_along_axis(replicas, order, 1)
    slots = np.full((layers, num_ranks, size), -1, dtype=np.int32)
    filled = np.zeros((layers, num_ranks), dtype=np.int64)
    load = np.zeros((layers, num_ranks), dtype=np.float32)
    holds = np.zeros((layers, experts, num_ranks), dtype=np.bool_)
    for expert in replicas.T:
        closed = filled == size
        if dedup:
            closed |= holds[rows, expert]
        rank = np.where(closed, np.inf, load).argmin(1)
        for i in np.flatnonzero(closed[rows, rank]):
            rank[i] = make_room(slots[i], filled[i], load[i], holds[i], part[i], expert[i])
        slots[rows, rank, filled[rows, rank]] = expert
        filled[rows, rank] += 1
        load[rows, rank] += part[rows, expert]
        holds[rows, expert, rank] = True
    return slots.reshape(layers, num_slots)


def make_room(slots: Slots, filled: Ints, load: Floats, holds: Bools, part: Floats, expert: int) -> int:
    """Moves one replica of one layer so that a rank without the expert has room for it; returns that rank.

    Called when every rank with room holds the expert. The others are full: such a rank holds S experts, a
    rank with room fewer, so one of the S can move. Takes the move after which the heavier of the two ranks
    is lightest (ties: lowest giving rank, then its first slot, then lowest taking rank).

    Changes slots [R, S], filled [R], load [R] and holds [E, R]; reads part [E].
    """
    givers, takers = np.flatnonzero(~holds[expert]), np.flatnonzero(filled < slots.shape[1])
    moved = part[slots[givers]][:, :, None]
    heavier = np.maximum(load[givers, None, None] - moved + part[expert], load[takers] + moved)
    heavier[holds[slots[givers]][:, :, takers]] = np.inf
    i, place, j = np.unravel_index(heavier.argmin(), heavier.shape)
    giver, taker = givers[i], takers[j]

    other = slots[giver, place]
    slots[taker, filled[taker]] = other
    slots[giver, place:-1] = slots[giver, place + 1 :]
    filled[[giver, taker]] += (-1, 1)
    load[[giver, taker]] += (-part[other], part[other])
    holds[other, [giver, taker]] = (False, True)
    return int(giver)
