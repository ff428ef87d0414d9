"""Borrowing by DeepEP 2.5: EPBuffer pushes experts into its peers' slots over NVLink, and adds their gradients up.

A plan becomes DeepEP's ``redundancy_mapping`` [R, spare_slots] int32 on the device: home rank * rows of a rank + home
row, -1 where nothing is borrowed. Read from sgl-deep-ep-v25 0.1.0rc0 (``buffers/ep.py``, ``csrc/buffers/ep.hpp``,
``include/deep_ep/layout/ep/eplb.cuh``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isoload.transport import Group
from isoload.transport.deep_ep import shared_buffer
from isoload.transport.peers import Peers
from isoload.weights.backend import Backend, BorrowPlan
from isoload.weights.moves import Stacks, Wait, as_bytes

ALIGNMENT = 32  # bytes; DeepEP moves multiples of it
NEEDS = {
    "lb_prefetch_weights": ("redundant_expert_weights", "expert_weights", "redundancy_mapping"),
    "lb_reduce_grads": ("redundant_expert_grads", "expert_grads", "redundancy_mapping"),
}


class DeepEPBorrow(Backend):
    """Neither waits for the host. Gradients are added in float32 in any order: runs need not repeat to the bit.

    The pools, and what gradients need on the way, lie in the region that EPBuffer keeps for it (``borrow_bytes`` of
    :class:`isoload.transport.deep_ep.DeepEPTransport`), taken in the same order on every rank.
    """

    name = "deep_ep"
    reads_moves = False

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        super().__init__(group, peers)
        self.buffer = shared_buffer(group)
        self._taken = 0
        self._whole: dict[int, Tensor] = {}  # the pools with their padding, by address
        self._sent: dict[tuple[object, ...], Tensor] = {}  # gradients where DeepEP reads them, by layout

    def start(self, stage: str, plan: BorrowPlan, held: Stacks, pools: Stacks) -> Wait:
        own = [padded(as_many(stack, plan.rows)) for stack in held[0]]
        whole = [self._whole[stack.data_ptr()] for stack in pools[0]]
        event = self.buffer.lb_prefetch_weights(whole, own, redundancy_mapping(plan))
        return lambda: event.current_stream_wait()

    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        mapping = redundancy_mapping(plan)
        for w, (grad, total) in enumerate(zip(grads[0], totals[0], strict=True)):
            sent, size = self._region(w, grad), grad.shape[1:].numel()
            sent[:, :size] = grad.flatten(1)
            # as many on every rank, as the mapping counts them
            sums = sent.new_zeros(plan.rows, sent.shape[1])
            sums[: len(total), :size] = total.flatten(1)
            self.buffer.lb_reduce_grads(sent, sums, mapping).current_stream_wait()
            total.copy_(sums[: len(total), :size].reshape(total.shape))

    def new_spare(self, like: Tensor, rows: int) -> Tensor:
        """See :meth:`Backend.new_spare`; raises ValueError for what DeepEP cannot move."""
        if like.dtype == torch.float64:
            raise ValueError(
                f"experts must not be float64 for borrow='deep_ep', which adds gradients in float32, got {like.dtype}"
            )
        shape = like.shape[1:]
        whole = self._take(rows, shape.numel() * like.itemsize)
        pool = whole.view(like.dtype)[:, : shape.numel()].view(rows, *shape)
        self._whole[pool.data_ptr()] = whole
        return pool

    def _take(self, rows: int, size: int) -> Tensor:
        """[rows, bytes] zeros in the buffer's region, size bytes and padding each."""
        storage: Tensor = self.buffer.runtime.lb_storage
        size += -size % ALIGNMENT
        if self._taken + rows * size > len(storage):
            raise ValueError(
                f"borrow_bytes must be at least {self._taken + rows * size} for these experts and their gradients, "
                f"got {len(storage)}"
            )
        taken = storage.narrow(0, self._taken, rows * size).view(rows, size)
        self._taken += rows * size
        return taken.zero_()

    def _region(self, w: int, like: Tensor) -> Tensor:
        """[spare_slots, F] float32 for the gradients of stack w, and padding, the same every time."""
        key = w, like.shape
        if key not in self._sent:
            size = like.shape[1:].numel() * torch.float32.itemsize
            self._sent[key] = self._take(len(like), size).view(torch.float32)
        return self._sent[key]


def padded(stack: Tensor) -> Tensor:
    """The rows of a contiguous stack, copied behind one another with padding where their size is none of DeepEP's."""
    missing = -(stack.shape[1:].numel() * stack.itemsize) % ALIGNMENT
    return F.pad(as_bytes(stack), (0, missing)) if missing else stack


def as_many(stack: Tensor, rows: int) -> Tensor:
    """[rows, ...] contiguous, as many on every rank; a copy only where a rank has fewer homes than others."""
    if len(stack) >= rows:
        return stack.narrow(0, 0, rows).contiguous()
    return torch.cat([stack, stack.new_zeros(rows - len(stack), *stack.shape[1:])])


def redundancy_mapping(plan: BorrowPlan) -> Tensor:
    """[R, spare_slots] int32, contiguous: home rank * plan.rows + home row of every spare slot's expert; -1 = none."""
    experts = plan.spare
    home = plan.home[experts.clamp(min=0).long()]
    ids = home.select(-1, 0) * plan.rows + home.select(-1, 1)
    return torch.where(experts >= 0, ids, -1).int().contiguous()


def check_deep_ep(group: Group) -> None:
    """Raises ValueError unless the group's transport has an EPBuffer that reaches all ranks over NVLink."""
    buffer: Any = shared_buffer(group)
    if buffer is None:
        raise ValueError("borrow must not be deep_ep without a DeepEPTransport, got 'deep_ep'")
    for method, names in NEEDS.items():
        taken = inspect.signature(getattr(buffer, method, lambda: None)).parameters
        if any(name not in taken for name in names):
            raise ValueError(
                f"borrow must not be deep_ep without {method} of DeepEP 2.5, got a {type(buffer).__name__}"
            )
    if buffer.num_nvlink_ranks != group.topology.num_ranks:
        raise ValueError(
            f"borrow must not be deep_ep where NVLink joins only {buffer.num_nvlink_ranks} of "
            f"{group.topology.num_ranks} ranks, got 'deep_ep'"
        )
