"""Placers called as ``isoload.place`` calls them, and what their slots are worth by plain counting."""

import itertools

import numpy as np

from isoload.placers import LiveRanks
from isoload.placers.base import make_scenarios


def live_ranks_of(ranks, slots, nodes=1, tick=None, before=None):
    node = np.repeat(np.arange(nodes, dtype=np.int32), ranks // nodes)
    return LiveRanks(node, np.ones(ranks) if tick is None else np.asarray(tick, float), slots, before)


def placed(placer, loads, ranks, slots, **live_ranks):
    """[L, P] slots that a placer makes of loads [L, E] or [batches, L, E]."""
    scenarios, _ = make_scenarios(loads)
    found = placer.place(scenarios, live_ranks_of(ranks, slots, **live_ranks)).slots
    return found.reshape(len(found), -1)


def busiest(slots, loads, ranks, tick=None):
    """[batches, L] largest rank cost for slots [L, P] and loads [batches, L, E], replicas sharing alike."""
    cost = np.ones(ranks) if tick is None else np.asarray(tick)
    found = np.zeros(loads.shape[:2])
    for b, layer in itertools.product(*map(range, loads.shape[:2])):
        rows = slots[layer].reshape(ranks, -1)
        copies = np.bincount(rows[rows >= 0], minlength=loads.shape[2])
        per_rank = [sum(loads[b, layer, e] / copies[e] for e in row if e >= 0) for row in rows]
        found[b, layer] = (per_rank * cost).max()
    return found


def level_of(slots, loads, ranks, tick=None):
    """[batches, L] least possible largest rank cost: over all sets of ranks, what only they can compute over their
    number, or what they compute together in one unit of cost. For few ranks."""
    speed = np.ones(ranks) if tick is None else 1 / np.asarray(tick)
    found = np.zeros(loads.shape[:2])
    sets = [np.array(s) for n in range(1, ranks + 1) for s in itertools.combinations(range(ranks), n)]
    for b, layer in itertools.product(*map(range, loads.shape[:2])):
        rows = slots[layer].reshape(ranks, -1)
        holds = np.zeros((ranks, loads.shape[2]), bool)
        for r, row in enumerate(rows):
            holds[r, row[row >= 0]] = True
        for some in sets:
            inside = ~np.delete(holds, some, axis=0).any(0)
            found[b, layer] = max(found[b, layer], loads[b, layer, inside].sum() / speed[some].sum())
    return found
