"""gather_rows: what every rank has in the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_rows(rows: Sequence[Tensor]) -> Tensor:
    """[R, W] the ranks' rows [W] by rank."""
    gathered = torch.empty(len(rows), len(rows[0]), dtype=torch.int32)
    for rank, row in enumerate(rows):
        for w, value in enumerate(row.tolist()):
            gathered[rank, w] = value
    return gathered
