"""Memory that every rank reads in place: virtual ranks share a process, GPUs have symmetric memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHANNEL = 0  # of the barriers; all our barriers of a group run on one stream
TIMEOUT_MS = 60_000


class Peers:
    """What the ranks of a group let each other read: of virtual ones, which share a process, any tensor. Lists of own
    tensors run over the owned ranks."""

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros that every rank can read, of one shape on all of them, made by all together."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def reach(self, own: list[Tensor]) -> list[Tensor]:
        """[R] every rank's tensor, given the own ones from :meth:`new`."""
        return own

    def meet(self) -> None:
        """A barrier of all ranks on the current stream; in one process there is nothing to wait for."""


class SymmetricMemory(Peers):
    """Tensors on CUDA devices that the other ranks of a process group read in place. All make them in the same order.

    Several ranks on one device need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._handles: dict[int, Any] = {}  # by address of the rank's own part
        self._views: dict[tuple[object, ...], list[Tensor]] = {}

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        tensor = symmetric.empty(*shape, dtype=dtype, device=device)
        self._handles[tensor.data_ptr()] = symmetric.rendezvous(tensor, self._group)
        return tensor.zero_()

    def reach(self, own: list[Tensor]) -> list[Tensor]:
        (mine,) = own
        handle = self._handles.get(mine.data_ptr())
        if handle is None:
            # not made here, as after .to() or a copy
            raise ValueError(
                "weights must stay in the memory they were made in, since other ranks read it, got a tensor elsewhere"
            )
        key = mine.data_ptr(), mine.shape, mine.dtype
        if key not in self._views:
            ranks = range(dist.get_world_size(self._group))
            self._views[key] = [handle.get_buffer(rank, mine.shape, mine.dtype) for rank in ranks]
        return self._views[key]

    def meet(self) -> None:
        next(iter(self._handles.values())).barrier(channel=CHANNEL, timeout_ms=TIMEOUT_MS)
