"""Policy ``hedge``: spare slots filled to level the forecast, then all of them, and an exact split of what came."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.policies.ahead import AheadPolicy, check_slots
from isoload.policies.base import Demand
from isoload.policies.spilling import EXACT, alive, plan_spill, routed_homes
from isoload.records import Plan


@dataclass(frozen=True)
class HedgePolicy(AheadPolicy):
    """The plan that levels the predicted loads, and against their errors more replicas of the hottest experts.

    Few slots level a forecast; those that are left go to the experts with most copies per replica, where the exact
    split of the true loads can use them.

    Options: slots (most that are filled per rank; None = all spare ones).
    """

    name = "hedge"
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_slots(self.slots)

    def fill_slots(self, demand: Demand, placed: PlacedLayers, slots: int) -> ops.SlotFill:
        level = plan_spill(demand, placed, spare_slots=slots)
        return ops.top_up(
            demand.loads,
            level.slot_to_expert,
            routed_homes(placed),
            placed.topology.num_ranks,
            slots,
            demand.at_home,
            alive=alive(placed),
            ranks_per_node=placed.topology.ranks_per_node,
        )

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return replace(EXACT.split(demand, placed), policy=self, telemetry=placed.telemetry)

    def split_and_share(self, demand: Demand, placed: PlacedLayers, rank: int) -> tuple[Plan, Tensor | None]:
        if type(self) is not HedgePolicy:
            return super().split_and_share(demand, placed, rank)
        made, row = EXACT.split_and_share(demand, placed, rank)
        return replace(made, policy=self, telemetry=placed.telemetry), row
