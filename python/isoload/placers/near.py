"""Part of placer ``scenario``: the same load with fewer rows to other nodes, for traces with per-token choices."""

from __future__ import annotations

from typing import Any

import numpy as np

from isoload.placers.base import Floats, Ints, Room, Slots
from isoload.placers.compiled import LANES, MAX_NODES, near_slots, num_threads
from isoload.placers.scenarios import WHOLE, Scenarios

SWAP_STEPS = 30_000  # changes that all searches of a layer try together
LONGEST = (
    10_000  # changes that one search tries at most; with few slots there are more searches, and shorter ones
)
WALK = 500  # first changes of all searches but the first, which may raise rows and exceed the caps
STRESS = 3.0  # times its distance from the mean load that a scenario gets in the cap of the exact split
MAX_TOKENS = 20_000  # of all traces together; more tokens save hardly more rows


def applies(scenarios: Scenarios, room: Room) -> bool:
    """Whether there are per-token choices, and several nodes, but no more than the search can count."""
    return bool(scenarios.topk_ids) and 1 < len(np.unique(room.node)) <= MAX_NODES


def fewer_rows(
    scenarios: Scenarios, room: Room, slots: Slots, node: Ints, home: Ints, moves: int | None
) -> tuple[Slots, dict[str, Any]]:
    """Return slots [L, R, S] with fewer rows to other nodes, and the rows of a token before and after as notes.

    Args:
        scenarios: with per-token choices.
        room: the ranks, and the placement from which `moves` counts.
        slots: [L, R, S] to start from.
        node, home: as the search of ``scenario`` has them: home [L, E] is the node that keeps a copy of an expert.
        moves: slots of a layer that may differ from the placement before. None: any number.
    """
    loads = scaled(scenarios.shares())
    ids, weight = choose_tokens(scenarios)
    steps = min(LONGEST, 12 * (slots.shape[1] * slots.shape[2]) ** 2)
    rows_node = np.unique(room.node, return_inverse=True)[1].astype(np.int32)
    found, rows = near_slots(
        slots=slots,
        loads=by_layer(loads),
        stress=by_layer(stressed(scenarios)),
        weight=np.pad(scenarios.weight, (0, -len(loads) % LANES)),
        tick=room.tick,
        node=node,
        home=home,
        before=room.before,
        topk_ids=ids.transpose(1, 0, 2),
        token_weight=weight,
        rows_node=rows_node,
        steps=steps,
        walk=min(WALK, steps // 4),
        moves=-1 if moves is None else moves,
        starts=max(1, SWAP_STEPS // steps),
        threads=num_threads(),
    )
    of_token = rows.mean(0) / max(1, int(weight.sum())) / (int(rows_node.max()) + 1)
    return found, {"rows_to_other_nodes": [round(float(number), 4) for number in of_token]}


def stressed(scenarios: Scenarios) -> Floats:
    """[n, L, E] loads of scenarios whose distance from the mean is enlarged."""
    shares = scenarios.shares()
    mean = scenarios.mean(shares)
    return scaled(np.maximum(mean + STRESS * (shares - mean), 0))


def scaled(shares: Floats) -> Floats:
    """Whole loads that add up to about WHOLE in every scenario and layer."""
    total = shares.sum(-1, keepdims=True)
    whole: Floats = np.rint(shares / np.maximum(total, np.finfo(float).tiny) * WHOLE)
    return whole


def by_layer(loads: Floats) -> Floats:
    """[L, E, n] of loads [n, L, E], n filled up to whole lanes."""
    padded: Floats = np.pad(loads, ((0, -len(loads) % LANES), (0, 0), (0, 0))).transpose(1, 2, 0)
    return padded


def choose_tokens(scenarios: Scenarios) -> tuple[Any, Any]:
    """[tokens, L, K] choices of evenly spaced tokens of every trace, and how often each counts: traces weigh alike."""
    most = MAX_TOKENS // len(scenarios.topk_ids)
    parts = [
        ids[np.linspace(0, len(ids) - 1, most).astype(int)] if len(ids) > most else ids
        for ids in scenarios.topk_ids
    ]
    width, longest = max(part.shape[2] for part in parts), max(map(len, parts))
    ids = [np.pad(part, ((0, 0), (0, 0), (0, width - part.shape[2])), constant_values=-1) for part in parts]
    weight = [np.full(len(part), round(longest / max(1, len(part)))) for part in parts]
    return np.concatenate(ids), np.concatenate(weight)
