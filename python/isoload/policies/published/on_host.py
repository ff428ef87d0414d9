"""What policies that plan on the CPU share: one read of a batch's tensors, and one copy of the plan to their device."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from isoload.value_checks import capturing, put_on

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def read_batch(policy: str, *tensors: Tensor) -> list[Ints]:
    """Return int64 arrays of the tensors. For CUDA tensors the host waits once, for all of them.

    Raises:
        ValueError: a CUDA graph is captured, in which the host can read nothing.
    """
    device = tensors[0].device
    if capturing(device):
        raise ValueError(
            f"policy {policy} must not run while a CUDA graph is captured, because it plans on the CPU: use libra, "
            "hedge or llep"
        )
    flat = np.array(torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist(), dtype=np.int64)
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = zip(np.split(flat, ends), tensors, strict=True)
    return [part.reshape(tuple(tensor.shape)) for part, tensor in parts]


def write_batch(device: torch.device, *arrays: Ints) -> list[Tensor]:
    """Return int32 tensors of the arrays on a device. The host does not wait."""
    flat = put_on(device, np.concatenate([array.ravel() for array in arrays]).tolist()).to(torch.int32)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
