"""Policy ``hedge``: spare slots filled to level the forecast, then all of them, and an exact split of what came."""

from __future__ import annotations

from dataclasses import dataclass

from isoload import ops
from isoload.policies.base import Demand
from isoload.policies.borrowing import BorrowPolicy, fill_spare, plan_spill
from isoload.records.placed_layers import PlacedLayers


@dataclass(frozen=True)
class HedgePolicy(BorrowPolicy):
    """The plan that levels the predicted loads, and against their errors more replicas of the hottest experts.

    Few slots level a forecast; those that are left go to the experts with most copies per replica, where the exact
    split of the true loads can use them.

    Options: slots (most that are filled per rank; None = all spare ones).
    """

    name = "hedge"
    ahead = True
    slots: int | None = None

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        level = plan_spill(demand, placed, self.slots)
        made = fill_spare(ops.top_up, demand, placed, self.slots, level.slot_to_expert)
        return placed.fill(made.slot_to_expert, telemetry=made.telemetry)
