"""Placer ``craft``: few replicas, in the layers in which they help most (CRAFT, arXiv 2603.28768)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isoload.placers.base import Floats, Ints, LiveRanks, Placed, Placer, Scenarios, Slots, rank_loads
from isoload.placers.eplb import pack_into
from isoload.wording import not_one_of

BUDGETS = ("gain", "knee")
GRIDS = ("powers", "full")


def make_grid(live_ranks: LiveRanks, experts: int, grid: str = "powers") -> list[int]:
    """Return the numbers of replicas of a layer to try: 0, and powers of two or all numbers up to R, if they fit."""
    num_ranks, limit = live_ranks.num_ranks, most_replicas(live_ranks, experts)
    if grid not in GRIDS:
        raise ValueError(not_one_of("grid", GRIDS, grid))
    powers = [2**i for i in range(num_ranks.bit_length())]
    numbers = sorted({*powers, num_ranks}) if grid == "powers" else list(range(1, num_ranks + 1))
    return [0, *(n for n in numbers if n <= limit)]


def most_replicas(live_ranks: LiveRanks, experts: int) -> int:
    """Return the maximum number of replicas of a layer; a rank has no expert twice."""
    return live_ranks.num_ranks * (min(experts, live_ranks.slots_per_rank or experts)) - experts


def check_budget(replicas: int | str, num_layers: int, live_ranks: LiveRanks, experts: int) -> None:
    if isinstance(replicas, str):
        if replicas not in BUDGETS:
            raise ValueError(f"replicas must be a number per rank, {' or '.join(BUDGETS)}, got {replicas!r}")
        return
    limit = min(num_layers, num_layers * most_replicas(live_ranks, experts) // live_ranks.num_ranks)
    if not 0 <= replicas <= limit:
        raise ValueError(
            f"replicas must be in 0..{limit} per rank over all layers, as many as fit, got {replicas}"
        )


def allocate(worth: Floats, grid: list[int], num_ranks: int, replicas: int | str) -> tuple[Ints, list[float]]:
    """Return [L] the replicas of each layer, by a knapsack of the largest summed worth within a budget, and the curve.

    The curve is the summed worth of 0, 1, ... replicas of a rank. `worth` [L, K] is that of each number of the grid
    [K], ascending from 0. `replicas`: number per rank over all layers; "gain": that with the largest worth per replica;
    "knee": that at which the curve is farthest above the straight line between its ends.
    """
    layers, budget = len(worth), len(worth) * num_ranks
    best = np.zeros(budget + 1)
    choice = np.zeros((layers, budget + 1), dtype=np.int64)
    for layer in range(layers):
        tried = np.full((len(grid), budget + 1), -np.inf)
        for k, number in enumerate(grid):
            tried[k, number:] = best[: budget + 1 - number] + worth[layer, k]
        choice[layer] = tried.argmax(0)  # the fewest replicas of equal worth
        best = tried.max(0)
    curve = best[::num_ranks]
    left = num_ranks * (replicas if isinstance(replicas, int) else pick_budget(curve, replicas))
    counts = np.zeros(layers, dtype=np.int32)
    for layer in reversed(range(layers)):
        counts[layer] = grid[choice[layer, left]]
        left -= counts[layer]
    return counts, [float(value) for value in curve]


def pick_budget(curve: Floats, rule: str) -> int:
    """Return the number of replicas per rank that a rule selects from the curve of worth [0..]."""
    steps = np.arange(len(curve))
    if len(curve) < 2 or curve[-1] <= curve[0]:
        return 0
    if rule == "gain":
        return 1 + int(((curve[1:] - curve[0]) / steps[1:]).argmax())
    line = curve[0] + (curve[-1] - curve[0]) * steps / steps[-1]
    return int((curve - line).argmax())


def assign(slots: Ints, num_ranks: int) -> Ints:
    """Return [L, R] slots of every rank, from the slots of every layer [L], by CRAFT's Algorithm 3. Ranks of a layer
    differ by at most one slot. Additional slots go to the ranks with the fewest slots so far; among equal ranks, to
    evenly spaced ones, and so to different nodes."""
    sizes = np.repeat(slots[:, None] // num_ranks, num_ranks, axis=1)
    totals = sizes.sum(0)
    for layer, more in enumerate(slots % num_ranks):
        if more == 0:
            continue
        cutoff = np.sort(totals)[more - 1]
        chosen = np.flatnonzero(totals < cutoff)
        tied = np.flatnonzero(totals == cutoff)
        needed = more - len(chosen)
        # Evenly spaced; from two on, the first and the last rank are included.
        spread = np.arange(needed) * (len(tied) - 1) // max(1, needed - 1)
        chosen = np.concatenate([chosen, tied[spread]])
        sizes[layer, chosen] += 1
        totals[chosen] += 1
    capacity: Ints = sizes.astype(np.int32)
    return capacity


def moved_slots(capacity: Ints, replicas: Ints, experts: int) -> Ints:
    """Return [L, R] slots of every rank, moved from layers that need fewer replicas now to layers that need more.

    `capacity` [L, R] are the present slots, replicas [L] the wanted ones. Every rank keeps its number of slots over all
    layers, and has no more in a layer than the most of any rank in any. In a layer no rank gains a slot while another
    loses one, so a rank that first gives back the slots of layers that shrink never has more than at the start. A layer
    whose replicas find no rank with a free slot gets fewer.
    """
    slots: Ints = capacity.copy()
    limit, stride = capacity.sum(0), int(capacity.max())
    change = experts + replicas - capacity.sum(1)
    for layer, number in enumerate(change):
        for _ in range(-number):
            rank = int(np.lexsort((slots.sum(0), slots[layer]))[-1])  # most slots in the layer, then in all
            slots[layer, rank] -= 1
    for layer, number in enumerate(change):
        for _ in range(number):
            totals = slots.sum(0)
            free = np.flatnonzero((totals < limit) & (slots[layer] < stride))
            if not len(free):
                break
            rank = int(free[np.lexsort((totals[free], slots[layer][free]))[0]])
            slots[layer, rank] += 1
    lost = (slots - capacity).clip(max=0)
    for short in np.flatnonzero(slots.sum(0) < limit):  # no layer that needs more could take these slots
        for shrunk in np.flatnonzero(lost[:, short] < 0)[: limit[short] - slots[:, short].sum()]:
            slots[shrunk, short] += 1
    return slots


def budget_capacity(counts: Ints, live_ranks: LiveRanks, experts: int) -> Ints:
    """Return [L, R] slots of every rank for the replicas of each layer [L] that a budget has chosen. Where ranks have a
    capacity, all slots with memory stay in use, for any budget."""
    if live_ranks.capacity is not None:
        return moved_slots(live_ranks.capacity, counts, experts)
    return assign(experts + counts, live_ranks.num_ranks)


OBJECTIVES = ("time", "gain", "printed")


@dataclass(frozen=True)
class CraftPlacer(Placer):
    """CRAFT's Algorithms 1 to 3: worth of replicas in each layer, a knapsack over layers, slots spread over ranks.

    Experts are packed as in ``eplb``, for the loads summed over batches; the worth is measured batch by batch. The
    placement is ragged, and its provenance contains the curve of worth. ``replicas="gain"`` (section 4.2.1) is 1 if
    worth is concave, as on all our traces. ``objective="printed"`` multiplies worth by the number of replicas, as
    Algorithm 2 is printed, which gives a few layers all of the budget.
    """

    name = "craft"
    has_budget = True
    takes_capacity = True
    replicas: int | str = "knee"  # per rank over all layers, or a rule for it: "knee", "gain"
    objective: str = "time"  # worth of replicas: "time", the busiest rank's load; "gain", mean/max; "printed"
    grid: str = "powers"  # numbers of replicas to try: "powers" of two, as published, or "full"

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        if self.objective not in OBJECTIVES:
            raise ValueError(not_one_of("objective", OBJECTIVES, self.objective))
        layers, experts, ranks = scenarios.num_layers, scenarios.num_experts, live_ranks.num_ranks
        check_budget(self.replicas, layers, live_ranks, experts)
        grid = make_grid(live_ranks, experts, self.grid)
        weight = scenarios.total().astype(np.float32)
        worth = self._worth(scenarios, weight, grid, ranks)
        counts, curve = allocate(worth, grid, ranks, self.replicas)
        slots = pack_into(weight, budget_capacity(counts, live_ranks, experts))
        notes = {"replicas_by_layer": counts.tolist(), "worth_by_replicas_of_a_rank": curve}
        return Placed(slots, notes=notes)

    def _worth(self, scenarios: Scenarios, weight: Any, grid: list[int], ranks: int) -> Floats:
        gains = []
        for number in grid:
            alone = assign(np.array([scenarios.num_experts + number]), ranks)  # slots of one layer alone
            slots = pack_into(weight, np.repeat(alone, scenarios.num_layers, axis=0))
            gains.append(self._replay(scenarios, slots))
        table = np.array(gains).T  # [L, K]
        gain = table - table[:, :1]
        worth: Floats = gain * np.array(grid) if self.objective == "printed" else gain
        return worth

    def _replay(self, scenarios: Scenarios, slots: Slots) -> Floats:
        peak = rank_loads(scenarios.loads, slots).max(-1)  # [n, L]
        if self.objective == "time":
            worth: Floats = -scenarios.weight @ peak
            return worth
        mean = scenarios.loads.sum(-1) / slots.shape[1]
        balance: Floats = scenarios.weight @ np.where(peak > 0, mean / np.maximum(peak, 1e-300), 1.0)
        return balance
