"""Policy ``hedge``: spare slots filled to level the forecast, then all of them, and an exact split of what came."""

from __future__ import annotations

from dataclasses import dataclass

from isoload import ops
from isoload.ops import Within
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand
from isoload.policies.borrowing import FillPolicy, fill_spare


@dataclass(frozen=True)
class HedgePolicy(FillPolicy):
    """The plan that levels the predicted loads, and against their errors more replicas of the hottest experts.

    Few slots level a forecast; those that are left go to the experts with most copies per replica, where the exact
    split of the true loads can use them.

    Options: slots (most that are filled per rank; None = all spare ones), within ("all", or "node": no expert is
    borrowed beyond its home's node), refill_above (see :class:`FillPolicy`).
    """

    name = "hedge"
    ahead = True
    slots: int | None = None
    within: Within = "all"
    refill_above: float | None = None

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        filled = self.fill_levels(demand, placed, within=self.within)
        filled = fill_spare(ops.top_up, demand, placed, self.slots, filled.slot_to_expert, within=self.within)
        return self.filled(demand, placed, filled)
