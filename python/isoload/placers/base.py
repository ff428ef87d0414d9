"""The protocol of an offline placer. A placer is a frozen dataclass whose fields are its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

Loads = np.ndarray[Any, np.dtype[np.float64]]
Slots = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Placer(ABC):
    """Base of all placers."""

    name: ClassVar[str]

    @abstractmethod
    def place(self, loads: Loads, num_ranks: int, slots_per_rank: int) -> Slots:
        """[L, P] int32 expert in each slot (-1 = absent), from loads [batches, L, E]; P = R*S >= E."""
