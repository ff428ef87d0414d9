"""The protocol of an offline placer. A placer is a frozen dataclass whose fields are its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from isoload.checks import check_options
from isoload.placers.scenarios import Scenarios

Slots = np.ndarray[Any, np.dtype[np.int32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Room:
    """Where experts may lie: the R ranks that are alive, in order."""

    node: Ints  # [R] int32 node of each
    tick: Floats  # [R] cost of one copy on each, 1.0 = nominal: 1/speed as :attr:`Topology.ticks` rounds it
    # for routed experts; None = as many as the placer's budget of replicas asks for
    slots_per_rank: int | None
    # [L, R, slots_per_rank] what lies there now (-1 = nothing), where the placer starts
    before: Slots | None = None
    home_rank: Ints | None = None  # [L, E] rank of each expert's home in `before`, of these R; -1 = not alive

    @property
    def num_ranks(self) -> int:
        return len(self.node)


@dataclass(frozen=True, eq=False)
class Placed:
    """What a placer decided."""

    slots: Slots  # [L, R, S] expert in each slot; -1 = absent, behind a rank's others
    # [L, R, S] wished parts; None = equal
    replica_weight: np.ndarray[Any, np.dtype[np.float32]] | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # for a placement's provenance: JSON values
    home_rank: Ints | None = None  # [L, E] rank whose slot owns the weights; None = that of the lowest slot


@dataclass(frozen=True)
class Placer(ABC):
    """Base of all placers."""

    name: ClassVar[str]
    takes_before: ClassVar[bool] = False  # whether it can start from a placement
    needs_tokens: ClassVar[bool] = False  # whether it needs traces with per-token choices
    uses_tokens: ClassVar[bool] = False  # whether it makes use of per-token choices where a trace has them
    # Whether it chooses the number of slots itself, by a budget of replicas.
    has_budget: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises ValueError for options that cannot be."""
        check_options(self)

    @abstractmethod
    def place(self, scenarios: Scenarios, room: Room) -> Placed:
        """Lays the experts of all layers out; the room has at least one slot for each.

        Raises:
            ValueError: options that do not fit the loads or the room.
        """


def slots_of(room: Room) -> int:
    """The room's slots per rank, for placers without a budget."""
    assert room.slots_per_rank is not None
    return room.slots_per_rank
