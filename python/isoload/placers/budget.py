"""Replica budgets: how many replicas each layer gets, and on which ranks they lie (CRAFT, Algorithms 2 and 3)."""

from __future__ import annotations

import numpy as np

from isoload.placers.base import Floats, Ints, Room
from isoload.wording import not_one_of

BUDGETS = ("gain", "knee")
GRIDS = ("powers", "full")


def make_grid(room: Room, experts: int, grid: str = "powers") -> list[int]:
    """Numbers of replicas of a layer that are tried: 0, and powers of two up to R, or all up to R, that have room."""
    num_ranks, most = room.num_ranks, most_replicas(room, experts)
    if grid not in GRIDS:
        raise ValueError(not_one_of("grid", GRIDS, grid))
    powers = [2**i for i in range(num_ranks.bit_length())]
    found = sorted({*powers, num_ranks}) if grid == "powers" else list(range(1, num_ranks + 1))
    return [0, *(n for n in found if n <= most)]


def most_replicas(room: Room, experts: int) -> int:
    """Replicas that a layer has room for; with a copy of every expert on every rank there is no other one."""
    return room.num_ranks * (min(experts, room.slots_per_rank or experts)) - experts


def check_budget(replicas: int | str, num_layers: int, room: Room, experts: int) -> None:
    """Refuses a budget of replicas that is out of range or has no room."""
    if isinstance(replicas, str):
        if replicas not in BUDGETS:
            raise ValueError(f"replicas must be a number of a rank, {' or '.join(BUDGETS)}, got {replicas!r}")
        return
    most = min(num_layers, num_layers * most_replicas(room, experts) // room.num_ranks)
    if not 0 <= replicas <= most:
        raise ValueError(
            f"replicas must be in 0..{most} of a rank over all layers, for which there is room, got {replicas}"
        )


def allocate(worth: Floats, grid: list[int], num_ranks: int, replicas: int | str) -> tuple[Ints, list[float]]:
    """Replicas of each layer, of the largest summed worth within a budget: a knapsack with one choice per layer.

    Args:
        worth: [L, K] what each number of the grid is worth in each layer; 0 for none.
        grid: [K] numbers of replicas, ascending from 0.
        num_ranks: R.
        replicas: of a rank over all layers; or "gain": the number with the largest worth per replica; or "knee": where
            the curve of worth is farthest above the straight line between its ends.

    Returns:
        [L] replicas; and the curve: summed worth of 0, 1, ... replicas of a rank.
    """
    layers, most = len(worth), len(worth) * num_ranks
    best = np.zeros(most + 1)
    choice = np.zeros((layers, most + 1), dtype=np.int64)
    for layer in range(layers):
        tried = np.full((len(grid), most + 1), -np.inf)
        for k, number in enumerate(grid):
            tried[k, number:] = best[: most + 1 - number] + worth[layer, k]
        choice[layer] = tried.argmax(0)  # of equals the fewest replicas
        best = tried.max(0)
    curve = best[::num_ranks]
    left = num_ranks * (replicas if isinstance(replicas, int) else pick_budget(curve, replicas))
    counts = np.zeros(layers, dtype=np.int32)
    for layer in reversed(range(layers)):
        counts[layer] = grid[choice[layer, left]]
        left -= counts[layer]
    return counts, [float(value) for value in curve]


def pick_budget(curve: Floats, rule: str) -> int:
    """Replicas of a rank by the curve of worth [0..]."""
    steps = np.arange(len(curve))
    if len(curve) < 2 or curve[-1] <= curve[0]:
        return 0
    if rule == "gain":
        return 1 + int(((curve[1:] - curve[0]) / steps[1:]).argmax())
    line = curve[0] + (curve[-1] - curve[0]) * steps / steps[-1]
    return int((curve - line).argmax())


def assign(slots: Ints, num_ranks: int) -> Ints:
    """[L, R] slots of every rank, from the slots of every layer [L]: CRAFT's Algorithm 3.

    Ranks of a layer differ by at most one. A slot more goes to ranks with fewest of them so far; of equals to ranks
    spread evenly over all, so over nodes.
    """
    found = np.repeat(slots[:, None] // num_ranks, num_ranks, axis=1)
    held = found.sum(0)
    for layer, more in enumerate(slots % num_ranks):
        if more == 0:
            continue
        cutoff = np.sort(held)[more - 1]
        chosen = np.flatnonzero(held < cutoff)
        tied = np.flatnonzero(held == cutoff)
        needed = more - len(chosen)
        # As evenly spaced as they can be, both ends among them from two on.
        spread = np.arange(needed) * (len(tied) - 1) // max(1, needed - 1)
        chosen = np.concatenate([chosen, tied[spread]])
        found[layer, chosen] += 1
        held[chosen] += 1
    capacity: Ints = found.astype(np.int32)
    return capacity
