"""What the policies that can fill spare slots ahead of the batch have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.placement import Placement
from isoload.policies.base import Demand, Policy
from isoload.policies.spilling import check_borrows


class AheadPolicy(Policy, ABC):
    """Base: :meth:`fill_slots` chooses the experts from predicted loads, or from the loads where none are predicted.

    Options: slots, the most spare slots of a rank that are filled, the last ones; None = all.
    """

    borrows = True
    ahead = True
    slots: int | None

    @abstractmethod
    def fill_slots(self, demand: Demand, placed: PlacedLayers, slots: int) -> ops.SlotFill:
        """Experts for at most so many spare slots of every rank."""

    def check(self, placement: Placement) -> None:
        check_borrows(self, placement)
        if self.slots is not None and self.slots > placement.spare_slots:
            raise ValueError(
                f"slots must be at most spare_slots, {placement.spare_slots}, for policy {self.name}, got {self.slots}"
            )

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        slots = placed.spare_slots if self.slots is None else self.slots
        made = self.fill_slots(demand, placed, slots)
        return placed.fill(made.slot_to_expert, telemetry=made.telemetry)


def check_slots(slots: int | None) -> None:
    if slots is not None and slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
