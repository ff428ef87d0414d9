"""Symmetric memory: tensors on CUDA devices that the other ranks of a group read in place.

Several ranks on one device need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.transport.peers import Peers

CHANNEL = 0  # of the barriers; all our barriers of a group run on one stream
TIMEOUT_MS = 60_000


class SymmetricMemory(Peers):
    """The symmetric tensors of one group. All ranks make them in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._handles: dict[int, Any] = {}  # by address of the rank's own part
        self._views: dict[tuple[object, ...], list[Tensor]] = {}

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros of one shape on every rank."""
        import torch.distributed._symmetric_memory as symmetric

        tensor = symmetric.empty(*shape, dtype=dtype, device=device)
        self._handles[tensor.data_ptr()] = symmetric.rendezvous(tensor, self._group)
        return tensor.zero_()

    def reach(self, own: list[Tensor]) -> list[Tensor]:
        """[R] every rank's tensor of the same rendezvous.

        Raises:
            ValueError: if the tensor was not made here, as after ``.to()`` or a copy.
        """
        (mine,) = own
        handle = self._handles.get(mine.data_ptr())
        if handle is None:
            raise ValueError(
                "weights must stay in the memory they were made in, since other ranks read it, got a tensor elsewhere"
            )
        key = mine.data_ptr(), mine.shape, mine.dtype
        if key not in self._views:
            ranks = range(dist.get_world_size(self._group))
            self._views[key] = [handle.get_buffer(rank, mine.shape, mine.dtype) for rank in ranks]
        return self._views[key]

    def meet(self) -> None:
        """A barrier on the current stream."""
        handle = next(iter(self._handles.values()))
        handle.barrier(channel=CHANNEL, timeout_ms=TIMEOUT_MS)
