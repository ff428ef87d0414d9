"""EPLB's global policy on NumPy arrays: the same slots as csrc/placers/eplb.h."""

from __future__ import annotations

from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Slots = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def place_eplb(weight: Floats, capacity: Slots, dedup: bool, threads: int = 1) -> Slots:
    """[L, R, S] expert in each slot, S the largest capacity, -1 = absent.

    Args:
        weight: [L, E] loads.
        capacity: [L, R] slots of every rank.
        dedup: never two replicas of one expert on one rank.
        threads: unused; the compiled loop spreads layers over them.

    Raises:
        ValueError: with dedup, capacities into which the replicas do not fit.
    """
    totals = capacity.sum(1)
    if len(set(totals.tolist())) == 1:
        return _place_layers(weight, capacity, int(totals[0]), dedup, int(capacity.max()))
    each = [
        _place_layers(weight[i : i + 1], capacity[i : i + 1], int(total), dedup, int(capacity.max()))
        for i, total in enumerate(totals)
    ]
    return np.concatenate(each)


def _place_layers(weight: Floats, capacity: Slots, num_slots: int, dedup: bool, width: int) -> Slots:
    """Layers with the same number of slots, all at once."""
    most = (capacity > 0).sum(1) if dedup else np.full(len(weight), num_slots)
    replicas, part = replicate(weight, num_slots, most)
    if width == 1 and num_slots == capacity.shape[1]:
        return replicas[:, :, None].astype(np.int32)  # nothing to pack; the published order
    return pack(replicas, part, capacity, dedup, width)


def replicate(loads: Floats, num_replicas: int, most: Ints) -> tuple[Ints, Floats]:
    """One replica each, then one more for the expert whose replicas are heaviest (ties: lowest id).

    Minimises the heaviest replica. Loads [L, E], at most ``most`` [L] replicas of an expert.

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


def pack(replicas: Ints, part: Floats, capacity: Slots, dedup: bool, width: int) -> Slots:
    """Heaviest replica first (ties: as made) onto the rank with the least load that has room (ties: lowest).

    Args:
        replicas: [L, P] expert of each replica.
        part: [L, E] load of one replica of each expert.
        capacity: [L, R] slots of every rank, P together.
        dedup: a rank that holds the expert already has no room for it.
        width: S, the slots of a rank in the result.

    Returns:
        [L, R, S] expert in each slot.
    """
    (layers, ranks), experts = capacity.shape, part.shape[1]
    rows = np.arange(layers)
    order = np.argsort(-np.take_along_axis(part, replicas, 1), axis=1, kind="stable")
    replicas = np.take_along_axis(replicas, order, 1)
    slots = np.full((layers, ranks, width), -1, dtype=np.int32)
    filled = np.zeros((layers, ranks), dtype=np.int64)
    load = np.zeros((layers, ranks), dtype=np.float32)
    holds = np.zeros((layers, experts, ranks), dtype=np.bool_)
    for expert in replicas.T:
        closed = filled == capacity
        if dedup:
            closed |= holds[rows, expert]
        rank = np.where(closed, np.inf, load).argmin(1)
        for i in np.flatnonzero(closed[rows, rank]):
            rank[i] = make_room(slots[i], filled[i], capacity[i], load[i], holds[i], part[i], expert[i])
        slots[rows, rank, filled[rows, rank]] = expert
        filled[rows, rank] += 1
        load[rows, rank] += part[rows, expert]
        holds[rows, expert, rank] = True
    return slots


def make_room(
    slots: Slots, filled: Ints, capacity: Slots, load: Floats, holds: Bools, part: Floats, expert: int
) -> int:
    """Moves one replica of one layer so that a rank without the expert has room for it; returns that rank.

    Called when every rank with room holds the expert. The others are full: such a rank holds S experts, a
    rank with room fewer, so one of the S can move. Takes the move after which the heavier of the two ranks
    is lightest (ties: lowest giving rank, then its first slot, then lowest taking rank).

    Changes slots [R, S], filled [R], load [R] and holds [E, R]; reads part [E].
    """
    givers, takers = np.flatnonzero(~holds[expert]), np.flatnonzero(filled < capacity)
    held = slots[givers]
    moved = np.where(held >= 0, part[held], 0)[:, :, None]
    heavier = np.maximum(load[givers, None, None] - moved + part[expert], load[takers] + moved)
    heavier[holds[held][:, :, takers] | (held < 0)[:, :, None]] = np.inf
    if not heavier.size or np.isinf(heavier.min()):
        raise ValueError("capacity must leave room for every replica on a rank without one of its expert")
    i, place, j = np.unravel_index(heavier.argmin(), heavier.shape)
    giver, taker = givers[i], takers[j]

    other = slots[giver, place]
    slots[taker, filled[taker]] = other
    slots[giver, place:-1] = slots[giver, place + 1 :]
    slots[giver, -1] = -1
    filled[[giver, taker]] += (-1, 1)
    load[[giver, taker]] += (-part[other], part[other])
    holds[other, [giver, taker]] = (False, True)
    return int(giver)
