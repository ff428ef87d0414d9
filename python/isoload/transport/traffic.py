"""What a group counts of its exchanges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Traffic:
    """What this process handed to the exchanges since the group was made.

    rows        [R, R] int64  rows dispatched, source x destination; only the process's own sources are filled
    bytes                     by stage; padding and what a rank sends to itself count, too, but not by what processes
                              on CPU find out, before an exchange, that they are in one stage
    host_syncs                times the host waited for values that an exchange brought
    """

    rows: Tensor
    bytes: Counter[str] = field(default_factory=Counter)
    host_syncs: int = 0

    @classmethod
    def of(cls, num_ranks: int, device: torch.device) -> Traffic:
        """Nothing so far."""
        with torch.inference_mode(False):  # else only inference could add to it
            return cls(torch.zeros(num_ranks, num_ranks, dtype=torch.int64, device=device))

    def move_to(self, device: torch.device) -> None:
        """Counts on where the rows are."""
        with torch.inference_mode(False):
            self.rows = self.rows.to(device)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; unlike ``nbytes`` also while torch.compile traces symbolic sizes."""
    return tensor.numel() * tensor.itemsize
