"""When the values of a tensor may be read: on a device that makes the host wait, in a captured graph never. And how the
host's own numbers come to a device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def values_readable(tensor: Tensor) -> bool:
    """Whether value checks run: on CPU always, elsewhere under ISOLOAD_CHECK=1, never while tracing."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("ISOLOAD_CHECK") == "1"


def check_whole_number(name: str, value: object) -> None:
    """Raises ValueError unless a value is an integer that the host has; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral | torch.SymInt):
        raise ValueError(f"{name} must be an integer, got {_named(value)}")


def check_whole(name: str, value: object) -> None:
    """Raises ValueError unless a value is an integer, or a tensor [] of one."""
    if not isinstance(value, Tensor):
        check_whole_number(name, value)
    elif value.dim() or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must be an integer or a tensor [] of one, got {_named(value)}")


def _named(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def capturing(device: torch.device) -> bool:
    """Whether what runs on the device now becomes part of a CUDA graph: the host can read nothing then."""
    on_gpu = device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_initialized()
    return on_gpu and torch.cuda.is_current_stream_capturing()


def may_be_kept(tensor: Tensor) -> bool:
    """Whether a cache may hold the tensor: tracing's FakeTensors must not outlive their mode."""
    return type(tensor) is Tensor


def put_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """[len(values)] int64. From pinned memory, so that the host does not wait for a GPU, as a copy of a list does."""
    on_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_cuda).to(device, non_blocking=on_cuda)
