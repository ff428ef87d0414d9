"""Placer ``trivial``: experts in order, as engines load them without a plan (SGLang's "trivial")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isoload.placers.base import Placed, Placer, Room, slots_of
from isoload.placers.scenarios import Scenarios


@dataclass(frozen=True)
class TrivialPlacer(Placer):
    """Slot p holds expert p mod E: in order, S per rank; slots left over hold replicas, from expert 0 on."""

    name = "trivial"

    def place(self, scenarios: Scenarios, room: Room) -> Placed:
        shape = (room.num_ranks, slots_of(room))
        row = np.arange(shape[0] * shape[1], dtype=np.int32) % scenarios.num_experts
        return Placed(np.tile(row.reshape(shape), (scenarios.num_layers, 1, 1)))
