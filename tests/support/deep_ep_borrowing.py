"""EPBuffer's moves of weights on CPU over gloo: experts pushed into peers' slots, their gradients added at home."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Done:
    def current_stream_wait(self, release_handle: bool = False) -> None:
        pass


def gather(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """[R] every rank's tensor."""
    raw = value.contiguous().flatten().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(group.size())]
    dist.all_gather(parts, raw, group=group)
    return [part.view(value.dtype).view(value.shape) for part in parts]


class BorrowingDouble:
    """Entry [r, c] of a mapping is the expert of rank r's slot c: owner * experts of a rank + its row, -1 = none."""

    group: dist.ProcessGroup
    runtime: Any

    def lb_prefetch_weights(
        self, redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, previous_event=None
    ):
        self._check(redundancy_mapping)
        assert 0 < len(expert_weights) == len(redundant_expert_weights) <= 16
        for spare, own in zip(redundant_expert_weights, expert_weights, strict=True):
            assert spare.is_contiguous() and own.is_contiguous() and len(own) == len(expert_weights[0])
            assert len(spare) == redundancy_mapping.shape[1]
            assert spare[0].nbytes == own[0].nbytes and own[0].nbytes % 32 == 0
            self._check_registered(spare)
            for owner, weights in enumerate(gather(own, self.group)):
                for slot, expert in enumerate(redundancy_mapping[self.group.rank()].tolist()):
                    if expert >= 0 and expert // len(own) == owner:
                        spare[slot].copy_(weights[expert % len(own)].view(spare.dtype).view(spare.shape[1:]))
        return Done()

    def lb_reduce_grads(
        self, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, previous_event=None
    ):
        self._check(redundancy_mapping)
        assert redundant_expert_grads.dtype == expert_grads.dtype == torch.float32
        assert redundant_expert_grads.dim() == expert_grads.dim() == 2
        assert len(redundant_expert_grads) == redundancy_mapping.shape[1]
        assert redundant_expert_grads.is_contiguous() and expert_grads.is_contiguous()
        assert expert_grads[0].nbytes % 32 == 0
        self._check_registered(redundant_expert_grads)
        given = gather(redundant_expert_grads, self.group)
        for rank in reversed(range(self.group.size())):  # in any order, as the device adds them
            for slot, expert in enumerate(redundancy_mapping[rank].tolist()):
                if expert >= 0 and expert // len(expert_grads) == self.group.rank():
                    expert_grads[expert % len(expert_grads)] += given[rank][slot]
        return Done()

    def _check(self, mapping: Tensor) -> None:
        assert mapping.dtype == torch.int32 and mapping.is_contiguous() and mapping.dim() == 2
        assert len(mapping) == self.group.size()
        assert all(torch.equal(mapping, other) for other in gather(mapping, self.group)), (
            "identical on all ranks"
        )

    def _check_registered(self, tensor: Tensor) -> None:
        """In the region for load balance, at the same place on every rank: peers write there."""
        start = tensor.data_ptr() - self.runtime.lb_storage.data_ptr()
        assert start >= 0 and start + tensor.nbytes <= self.runtime.lb_storage.nbytes
        offsets = gather(torch.tensor([start]), self.group)
        assert all(int(other) == start for other in offsets), "symmetric"
