"""When the values of a tensor may be read: on a device that makes the host wait."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def values_readable(tensor: Tensor) -> bool:
    """Whether value checks run: on CPU always, elsewhere under ISOLOAD_CHECK=1, never while tracing."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("ISOLOAD_CHECK") == "1"


def may_be_kept(tensor: Tensor) -> bool:
    """Whether a cache may hold the tensor: tracing's FakeTensors must not outlive their mode."""
    return type(tensor) is Tensor
