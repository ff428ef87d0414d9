"""Memory that every rank reads in place: virtual ranks share a process, GPUs have symmetric memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHANNEL = 0  # of the barriers
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


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

    What one call of :meth:`new` shares is freed with the tensor that it returned.

    Args:
        group: whose processes read each other's memory. Several of them on one device need OVERLAP=1.
        device: this rank's GPU.
        timeout: of barriers. After it the barrier kills the CUDA context.
        masked: whether torch takes GPUs for one, since they have one device index in their processes.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, masked: bool = False
    ) -> None:
        self._group, self._device, self._masked = group, device, masked
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        # by address of the rank's own part: torch's handle, and views of all parts by shape and dtype
        self._shared: dict[int, tuple[Any, dict[tuple[object, ...], list[Tensor]]]] = {}
        self.pad = self.new((2,), torch.int64, device)  # its handle has the signals of the barriers
        self._met: torch.cuda.Event | None = None

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not from torch's pool: there the tensor's offset, and whether its block needs a rendezvous, depend on what
        # this process has freed before, which can differ between ranks.
        strides = torch.empty(shape, device="meta").stride()
        tensor = _SymmetricMemory.empty_strided_p2p(tuple(shape), strides, dtype, device)
        if self._masked:
            os.environ[OVERLAP] = "1"
        try:
            handle = symmetric.rendezvous(tensor, self._group)
        finally:
            if self._masked:
                del os.environ[OVERLAP]
        self._shared[tensor.data_ptr()] = handle, {}
        weakref.finalize(tensor, self._shared.pop, tensor.data_ptr()).atexit = False
        return tensor.zero_()

    def reach(self, own: list[Tensor]) -> list[Tensor]:
        (mine,) = own
        if mine.data_ptr() not in self._shared:
            # not made here, as after .to() or a copy
            raise ValueError(
                "weights must stay in the memory they were made in, since other ranks read it, got a tensor elsewhere"
            )
        handle, views = self._shared[mine.data_ptr()]
        key = mine.shape, mine.dtype
        if key not in views:
            ranks = range(dist.get_world_size(self._group))
            views[key] = [handle.get_buffer(rank, mine.shape, mine.dtype) for rank in ranks]
        return views[key]

    def meet(self) -> None:
        # On two streams, barriers of different layers could pair. An external event also orders replays of graphs.
        stream = torch.cuda.current_stream(self._device)
        if self._met is None:
            self._met = torch.cuda.Event(external=True)
        stream.wait_event(self._met)
        self._shared[self.pad.data_ptr()][0].barrier(channel=CHANNEL, timeout_ms=self._timeout_ms)
        self._met.record(stream)
