"""Numbers that the host has, on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def put_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """[len(values)] int64. From pinned memory, so that the host does not wait for a GPU, as a copy of a list does."""
    on_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_cuda).to(device, non_blocking=on_cuda)
