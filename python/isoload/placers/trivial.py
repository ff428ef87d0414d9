"""Placer ``trivial``: experts in order, as engines load them without a plan (SGLang's "trivial")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isoload.placers.base import Loads, Placer, Slots


@dataclass(frozen=True)
class TrivialPlacer(Placer):
    """Slot p holds expert p mod E: in order, S per rank; slots left over hold replicas, from expert 0 on."""

    name = "trivial"

    def place(self, loads: Loads, num_ranks: int, slots_per_rank: int) -> Slots:
        _, layers, experts = loads.shape
        return np.tile(np.arange(num_ranks * slots_per_rank, dtype=np.int32) % experts, (layers, 1))
