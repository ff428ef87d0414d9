"""When the values of a tensor may be read: on a device that makes the host wait, in a captured graph never."""

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


def capturing(device: torch.device) -> bool:
    """Whether what runs on the device now becomes part of a CUDA graph: the host can read nothing then."""
    on_gpu = device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_initialized()
    return on_gpu and torch.cuda.is_current_stream_capturing()


def may_be_kept(tensor: Tensor) -> bool:
    """Whether a cache may hold the tensor: tracing's FakeTensors must not outlive their mode."""
    return type(tensor) is Tensor
