"""Fetched: a layer's spare slots filled before its batch is known, and their weights on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from isoload.layer.moe import MoE
from isoload.placed_layers import PlacedLayers
from isoload.planning import fill
from isoload.transport import checksum
from isoload.value_checks import values_readable
from isoload.weights.borrow import Borrowed


@dataclass(frozen=True, eq=False)
class Fetched:
    """What one layer has got ahead.

    layer     whose spare slots they are
    filled    the slots
    borrowed  their weights; None where nothing is borrowed
    marks     the owned ranks' Parameters as they were sent, see :meth:`isoload.weights.storage.RankWeights.marks`
    """

    layer: MoE
    filled: PlacedLayers
    borrowed: Borrowed | None
    marks: list[list[tuple[int, int]]]

    @property
    def is_placed(self) -> bool:
        """Whether the layer's placement is the one it was filled for."""
        return self.filled.host is self.layer.placement

    def check(self) -> None:
        """Raises ValueError if the layer's Parameters have changed since."""
        if self.marks != marks_of(self.layer):
            raise ValueError(
                "expert Parameters must stay as they are while their weights travel ahead: call forget() of the "
                "stack on all ranks after a change, got Parameters that changed since"
            )


def fill_ahead(layer: MoE, loads: Tensor, slots: int | None) -> PlacedLayers:
    """A layer's spare slots by predicted loads [R, E] int32, at most so many per rank; None = as the policy says."""
    policy = layer.policy if slots is None else replace(layer.policy, slots=slots)  # type: ignore[call-arg]
    return fill(loads, layer.balancer.placed_on(loads.device), None, policy)


def fetch(layer: MoE, filled: PlacedLayers, beside: Borrowed | None) -> Fetched:
    """Begins to bring the weights of filled slots; what `beside` brought, for a layer that computes, stays."""
    assert layer.borrowing is not None
    return Fetched(layer, filled, layer.borrowing.borrow(filled, beside), marks_of(layer))


def fact_of(filled: PlacedLayers | None) -> int:
    """A number that is the same on ranks with the same slots, where the host may read them; 0 without any."""
    if filled is None:
        return 0
    slots = filled.slot_to_expert
    return checksum(slots.tolist()) if values_readable(slots) else 1


def marks_of(layer: MoE) -> list[list[tuple[int, int]]]:
    return [rank.marks() for rank in layer._ranks()]
