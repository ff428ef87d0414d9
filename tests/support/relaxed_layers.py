"""Layers with real-valued splits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.ops.tables import ReplicaTables
from support.cases import draw


def layers(dtype: torch.dtype) -> tuple[Tensor, ReplicaTables, dict[str, Tensor]]:
    """20 layers of 256 experts on 16 ranks, with base."""
    cases = [draw("split_256", 16, seed) for seed in range(20)]
    tables = ops.replica_tables(torch.from_numpy(np.stack([case.slot_to_expert for case in cases])), 16, 256)
    options = {"base": torch.arange(320, dtype=dtype).view(20, 16)}
    return torch.from_numpy(np.stack([case.loads for case in cases])), tables, options


def reals(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
