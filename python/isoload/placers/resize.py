"""Start slots for a placer after the number of ranks, or of slots on a rank, has changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isoload.placers.base import Floats, Ints, Slots


def resized(rows: Slots, ranks: Sequence[int], size: int | Ints, loads: Floats, tick: Floats) -> Slots:
    """Return [L, N, S] slots of the N live ranks of the new group, from which a placer starts.

    As many replicas of rows [L, R, S] (no expert twice on a rank) as possible stay if every expert gets a slot. Those
    without a rank go to the ranks with the least load, the largest load first. Remaining slots take replicas of the
    experts with the most load per replica. `ranks` [N] are ascending; those from R on are new and empty. `size` is the
    slots of every rank, or [L, N] of each, after which a rank's slots are -1. `loads` are [L, E], tick [N] costs of one
    copy.
    """
    stays = np.array([rank for rank in ranks if rank < rows.shape[1]], dtype=np.int64)
    capacity = np.broadcast_to(np.asarray(size, dtype=np.int32), (len(rows), len(ranks)))
    filled = np.full((len(rows), len(ranks), int(capacity.max())), -1, dtype=np.int32)
    for layer, load in enumerate(loads):
        staying = _kept(rows[layer, stays], int(capacity[layer].sum()), capacity[layer], len(load))
        for rank, row in enumerate(staying):
            stay = row[row >= 0]
            filled[layer, rank, : len(stay)] = stay
        _fill(filled[layer], capacity[layer], load, tick)
    return filled


def filled_up(slots: Slots, loads: Floats, tick: Floats) -> Slots:
    """Fill absent slots: each time the expert with most load per replica, on the rank with the least load."""
    full: Slots = slots.copy()
    for layer, load in enumerate(loads):
        _fill(full[layer], np.full(slots.shape[1], slots.shape[2]), load, tick)
    return full


def _kept(slots: Ints, num_slots: int, capacity: Ints, experts: int) -> Ints:
    """Return [R, S] the experts that stay, -1 elsewhere; the new group has num_slots slots, capacity of each rank."""
    if ((slots >= 0).sum(1) > capacity[: len(slots)]).any():
        slots = _narrowed(slots, capacity, experts)
    copies = np.bincount(slots[slots >= 0], minlength=experts).astype(np.int32)
    short = int((copies == 0).sum()) - (num_slots - int((slots >= 0).sum()))
    return _without_replicas(slots, copies, max(short, 0))


def _fill(slots: Ints, capacity: Ints, load: Floats, tick: Floats) -> None:
    copies = np.bincount(slots[slots >= 0], minlength=len(load))
    lost = sorted(np.flatnonzero(copies == 0), key=lambda expert: -load[expert])
    while (free := (slots >= 0).sum(1) < capacity).any():
        per_replica = load / np.maximum(copies, 1)
        cost = np.where(slots >= 0, per_replica[slots], 0.0).sum(1) * tick
        rank = int(np.where(free, cost, np.inf).argmin())
        if lost:
            expert = int(lost.pop(0))
        else:
            per_replica[slots[rank][slots[rank] >= 0]] = -1.0  # no expert twice on a rank
            expert = int(per_replica.argmax())
            if per_replica[expert] < 0:  # the rank holds all experts
                return
        slots[rank, np.flatnonzero(slots[rank] < 0)[0]] = expert
        copies[expert] += 1


def _narrowed(slots: Ints, capacity: Ints, experts: int) -> Ints:
    """Return [R, S] with at most `capacity` experts on each rank [R]: first one replica of as many experts as possible.
    Uses augmenting paths between experts and ranks, starting with the experts that have the fewest replicas."""
    ranks_of = [np.flatnonzero((slots == expert).any(1)) for expert in range(experts)]
    chosen: list[list[int]] = [[] for _ in slots]

    def assign(expert: int, visited: set[int]) -> bool:
        for rank in ranks_of[expert].tolist():
            if rank in visited:
                continue
            visited.add(rank)
            if len(chosen[rank]) < capacity[rank]:
                chosen[rank].append(expert)
                return True
            for place, other in enumerate(chosen[rank]):
                if assign(other, visited):
                    chosen[rank][place] = expert
                    return True
        return False

    for expert in sorted(range(experts), key=lambda number: len(ranks_of[number])):
        assign(expert, set())
    staying = np.full_like(slots, -1)
    for rank, row in enumerate(slots):
        first = set(chosen[rank])
        others = [expert for expert in row if expert >= 0 and expert not in first]
        others = others[: capacity[rank] - len(first)]
        stay = [*first, *others]
        staying[rank] = np.where(np.isin(row, stay), row, -1)
    return staying


def _without_replicas(slots: Ints, copies: Ints, number: int) -> Ints:
    """Return [R, S] after removing `number` replicas, each time the last one of the expert with the most replicas."""
    slots, copies = slots.copy(), copies.copy()
    for _ in range(number):
        expert = int(copies.argmax())
        place = np.flatnonzero(slots.ravel() == expert)[-1]
        slots.ravel()[place] = -1
        copies[expert] -= 1
    return slots
