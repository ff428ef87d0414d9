"""gather_rows: what every rank has in the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_rows(rows: Sequence[Tensor], beside: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """[R, W] the ranks' rows [W] and [R, F] what they tell beside them, by rank."""
    gathered = torch.empty(len(rows), len(rows[0]), dtype=torch.int32)
    told = torch.empty(len(rows), len(beside[0]), dtype=torch.int32)
    for rank, row in enumerate(rows):
        for w, value in enumerate(row.tolist()):
            gathered[rank, w] = value
        for f, value in enumerate(beside[rank]):
            told[rank, f] = value
    return gathered, told
