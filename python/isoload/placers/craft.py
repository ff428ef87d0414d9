"""Placer ``craft``: few replicas, in the layers where they help (CRAFT, arXiv 2603.28768)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isoload.placers.base import Floats, Placed, Placer, Room, Slots
from isoload.placers.budget import allocate, assign, check_budget, make_grid
from isoload.placers.eplb import pack_into
from isoload.placers.scenarios import Scenarios
from isoload.placers.weights import rank_loads
from isoload.wording import not_one_of

OBJECTIVES = ("time", "gain", "printed")


@dataclass(frozen=True)
class CraftPlacer(Placer):
    """Algorithms 1 to 3: what replicas gain in each layer, a knapsack over layers, slots spread over ranks.

    Experts are packed as ``eplb`` packs them, for the loads summed over batches; what that is worth is replayed batch
    by batch. The placement is ragged: layers and ranks have different numbers of slots.

    Options:
        replicas: of a rank over all layers; "knee": where the curve of worth bends; "gain": the number with the largest
            worth per replica, as CRAFT chooses (section 4.2.1): 1 where worth is concave, as on all our traces.
            The placement's provenance has the curve.
        objective: what replicas of a layer are worth: "time": by how much its mean busiest rank's load falls; "gain":
            by how much its mean balance (mean/max) rises, as CRAFT's text says; "printed": that times their number, as
            its Algorithm 2 is printed, which gives a few layers all of the budget.
        grid: numbers of replicas that are tried: "powers" of two, as published, or "full".

    Raises:
        ValueError: an option that is out of range.
    """

    name = "craft"
    has_budget = True
    replicas: int | str = "knee"
    objective: str = "time"
    grid: str = "powers"

    def place(self, scenarios: Scenarios, room: Room) -> Placed:
        if self.objective not in OBJECTIVES:
            raise ValueError(not_one_of("objective", OBJECTIVES, self.objective))
        layers, experts, ranks = scenarios.num_layers, scenarios.num_experts, room.num_ranks
        check_budget(self.replicas, layers, room, experts)
        grid = make_grid(room, experts, self.grid)
        weight = scenarios.total().astype(np.float32)
        worth = self._worth(scenarios, weight, grid, ranks)
        counts, curve = allocate(worth, grid, ranks, self.replicas)
        slots = pack_into(weight, assign(experts + counts, ranks))
        notes = {"replicas_by_layer": counts.tolist(), "worth_by_replicas_of_a_rank": curve}
        return Placed(slots, notes=notes)

    def _worth(self, scenarios: Scenarios, weight: Any, grid: list[int], ranks: int) -> Floats:
        """[L, K] what each number of replicas is worth in each layer: Algorithm 1."""
        found = []
        for number in grid:
            alone = assign(np.array([scenarios.num_experts + number]), ranks)  # a layer by itself
            slots = pack_into(weight, np.repeat(alone, scenarios.num_layers, axis=0))
            found.append(self._replay(scenarios, slots))
        table = np.array(found).T  # [L, K]
        gain = table - table[:, :1]
        worth: Floats = gain * np.array(grid) if self.objective == "printed" else gain
        return worth

    def _replay(self, scenarios: Scenarios, slots: Slots) -> Floats:
        """[L] mean over scenarios of the balance, or of the busiest rank's load with a minus."""
        peak = rank_loads(scenarios.loads, slots).max(-1)  # [n, L]
        if self.objective == "time":
            worth: Floats = -scenarios.weight @ peak
            return worth
        mean = scenarios.loads.sum(-1) / slots.shape[1]
        balance: Floats = scenarios.weight @ np.where(peak > 0, mean / np.maximum(peak, 1e-300), 1.0)
        return balance
