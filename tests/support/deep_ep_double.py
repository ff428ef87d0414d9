"""DeepEP's buffers on CPU over gloo: the signatures of the wheels, what they refuse, and what they compute.

Written from the wheels' sources (versions: support.deep_ep_signatures), and as unkind as they allow: rows come in any
order unless deterministic, weights of copies elsewhere come too, memory behind the last row is nan. The values are held
to the wheels' own plain-torch references where these are installed (tests/transport/test_deep_ep_wheels.py).
Shapes: T tokens, K choices, N rows, H columns, R ranks, P experts (isoload's slots).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.deep_ep_borrowing import BorrowingDouble

Pieces = list[Tensor]  # [R] by destination, or by source


class Event:
    """EventOverlap of work that is done: waiting for it returns at once."""

    def current_stream_wait(self, release_handle: bool = False) -> None:
        pass


def swap(pieces: Pieces, group: dist.ProcessGroup) -> Pieces:
    """Piece d to rank d; what came from each rank."""
    sizes = torch.tensor([len(piece) for piece in pieces])
    got = torch.empty_like(sizes)
    dist.all_to_all_single(got, sizes, group=group)
    arrived = pieces[0].new_empty(int(got.sum()), *pieces[0].shape[1:])
    dist.all_to_all_single(
        arrived, torch.cat(pieces), got.tolist(), [len(piece) for piece in pieces], group=group
    )
    return list(arrived.split(got.tolist()))


def tokens_to(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Pieces:
    """[R] the tokens that every rank gets, ascending."""
    size = num_experts // num_ranks
    owner = topk_idx.div(size, rounding_mode="floor")
    return [(owner == rank).any(1).nonzero().flatten() for rank in range(num_ranks)]


def local_ids(topk_idx: Tensor, rank: int, size: int) -> Tensor:
    here = topk_idx.div(size, rounding_mode="floor") == rank
    return torch.where(here, topk_idx - rank * size, -1)


def sum_copies(parts: Pieces, tokens: Pieces, topk_idx: Tensor, size: int, bias: Tensor | None) -> Tensor:
    """Rank d's part of a token, added in float32 at the place of the token's last choice on d; rounded once."""
    hidden = parts[0].shape[1]
    placed = torch.zeros(*topk_idx.shape, hidden)
    owner = topk_idx.div(size, rounding_mode="floor")
    for rank, (part, chosen) in enumerate(zip(parts, tokens, strict=True)):
        last = topk_idx.shape[1] - 1 - (owner[chosen] == rank).flip(1).int().argmax(1)
        placed[chosen, last] = part.float()
    total = torch.zeros(len(topk_idx), hidden) if bias is None else bias.float()
    for k in range(topk_idx.shape[1]):
        total = total + placed[:, k]
    return total.bfloat16()


def weights_home(parts: Pieces, tokens: Pieces, topk_idx: Tensor, size: int) -> Tensor:
    """[T, K] every copy's weight from the rank that has the copy; 0 for an absent one."""
    returned = torch.zeros(topk_idx.shape)
    owner = topk_idx.div(size, rounding_mode="floor")
    for rank, (part, chosen) in enumerate(zip(parts, tokens, strict=True)):
        here = owner[chosen] == rank
        returned[chosen] = torch.where(here, part, returned[chosen])
    return returned


class EPHandle:
    def __init__(self, topk_idx: Tensor, num_experts: int, order: Tensor, got: list[int]) -> None:
        self._topk_idx, self._version = topk_idx, None if topk_idx.is_inference() else topk_idx._version
        self.num_experts, self.order, self.got = num_experts, order, got
        self.psum_num_recv_tokens_per_scaleup_rank = torch.tensor(got).cumsum(0).int()
        self.expanded: tuple[Tensor, Tensor] | None = None  # row and choice of every expanded row

    def expand(self, local: Tensor, deterministic: bool, size: int) -> None:
        """Rows by local expert [N, K], one for every copy, in any order within an expert unless deterministic."""
        row, place = (local >= 0).nonzero().unbind(1)
        if not deterministic:
            mixed = torch.randperm(len(row))
            row, place = row[mixed], place[mixed]
        by_expert = local[row, place].argsort(stable=True)
        self.expanded = row[by_expert], place[by_expert]
        self.num_recv_tokens_per_expert_list = local[row, place].bincount(minlength=size).tolist()

    def reduced(self, x: Tensor, weights: Tensor | None, top_k: int) -> tuple[Tensor, Tensor | None]:
        """Expanded rows [C, H] added up by row in float32, by choice, rounded once; weights [C] as [N, K]."""
        assert self.expanded is not None and len(x) == len(self.expanded[0])
        row, place = self.expanded
        copies = torch.zeros(len(self.order), top_k, x.shape[1])
        copies[row, place] = x.float()
        sums = torch.zeros(len(self.order), x.shape[1])
        for k in range(top_k):
            sums = sums + copies[:, k]
        if weights is None:
            return sums.bfloat16(), None
        assert weights.shape == row.shape
        returned = torch.zeros(len(self.order), top_k)
        returned[row, place] = weights
        return sums.bfloat16(), returned

    @property
    def topk_idx(self) -> Tensor:
        unchanged = self._version is None or self._version == self._topk_idx._version
        assert unchanged, "topk_idx was modified while the handle is in use"
        return self._topk_idx


class _Elastic:
    """What EPBuffer and ElasticBuffer share."""

    max_slots_per_rank: int
    group: dist.ProcessGroup
    num_max_tokens_per_rank: int
    deterministic: bool

    def _send(self, x: Tensor, topk_idx: Tensor, num_experts: int) -> Pieces:
        return swap([x[t] for t in tokens_to(topk_idx, num_experts, self.group.size())], self.group)

    def get_theoretical_num_sms(
        self,
        num_experts,
        num_topk,
        num_scaleout_topk=0,
        rdma_gbs=0,
        nvlink_gbs=0,
        sm_read_gbs=0,
        sm_write_gbs=0,
    ):
        assert num_experts % self.group.size() == 0
        return 4

    def _dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        num_experts: Any,
        most: Any,
        handle: Any,
        wait: Any,
        expand: bool = False,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0
        self.get_theoretical_num_sms(num_experts, 1)
        if handle is not None:
            assert topk_idx is None and not wait
            real = torch.cat(self._send(x, handle.topk_idx, handle.num_experts))[handle.order]
            assert expand == (handle.expanded is not None)
            if expand:
                return real[handle.expanded[0]], None, None, handle, Event()
            padding = x.new_full((handle.allocated - len(real), x.shape[1]), torch.nan)
            return torch.cat([real, padding]), None, None, handle, Event()
        num_ranks = self.group.size()
        assert num_experts <= 2048 and num_experts // num_ranks <= self.max_slots_per_rank
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.shape[1] <= 32
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        most = self.num_max_tokens_per_rank if most is None else most
        assert len(x) <= most <= self.num_max_tokens_per_rank
        rows, ids, weights = (self._send(v, topk_idx, num_experts) for v in (x, topk_idx, topk_weights))
        got, count = [len(piece) for piece in rows], sum(map(len, rows))
        order = torch.arange(count) if self.deterministic else torch.randperm(count)
        handle = EPHandle(topk_idx, num_experts, order, got)
        handle.allocated = count if wait in (None, True) else num_ranks * most
        local = local_ids(torch.cat(ids), self.group.rank(), num_experts // num_ranks)
        for row in local.tolist():
            present = [i for i in row if i >= 0]
            assert len(set(present)) == len(present), "the kernel traps"
        if expand:
            assert wait in (None, True), "not written for worst-case sizes"
            handle.expand(local[order], self.deterministic, num_experts // num_ranks)
            row, place = handle.expanded
            return torch.cat(rows)[order][row], None, torch.cat(weights)[order][row, place], handle, Event()
        padding = handle.allocated - count
        return (
            torch.cat([torch.cat(rows)[order], x.new_full((padding, x.shape[1]), torch.nan)]),
            torch.cat([local[order], local.new_full((padding, local.shape[1]), 7)]),
            torch.cat(
                [torch.cat(weights)[order], topk_weights.new_full((padding, local.shape[1]), torch.nan)]
            ),
            handle,
            Event(),
        )

    def _return(self, values: Tensor, handle: EPHandle) -> Pieces:
        whole = values.new_empty(len(handle.order), values.shape[1])
        whole[handle.order] = values[: len(handle.order)]
        return swap(list(whole.split(handle.got)), self.group)

    def _combine(self, x: Tensor, handle: EPHandle, topk_weights: Any, bias: Any) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % 256 == 0
        num_ranks, topk_idx = self.group.size(), handle.topk_idx
        size = handle.num_experts // num_ranks
        tokens = tokens_to(topk_idx, handle.num_experts, num_ranks)
        if bias is not None:
            assert bias.shape == (len(topk_idx), x.shape[1]) and bias.dtype == x.dtype
        if handle.expanded is not None:
            x, topk_weights = handle.reduced(x, topk_weights, topk_idx.shape[1])
        sums = self.reduce(self._return(x, handle), tokens, topk_idx, size, bias)
        returned = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
            returned = weights_home(self._return(topk_weights, handle), tokens, topk_idx, size)
        return sums, returned, Event()

    reduce = staticmethod(sum_copies)


class EPBuffer(_Elastic, BorrowingDouble):
    max_slots_per_rank = 512

    def __init__(
        self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, use_fp8_dispatch=False,
        lb_allocation_plan_or_num_bytes=0, deterministic=False, allow_hybrid_mode=True,
        allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0,
        num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        assert lb_allocation_plan_or_num_bytes % 2**21 == 0
        self.group, self.deterministic = group, deterministic
        self.num_max_tokens_per_rank, self.num_nvlink_ranks = num_max_tokens_per_rank, group.size()
        self.runtime = SimpleNamespace(
            lb_storage=torch.zeros(lb_allocation_plan_or_num_bytes, dtype=torch.uint8)
        )

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None, do_handle_copy=False,
        do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False,
        defer_epilogue=False,
    ):  # fmt: skip
        assert not do_handle_copy
        most = num_max_tokens_per_rank
        return self._dispatch(x, topk_idx, topk_weights, num_experts, most, handle, do_cpu_sync, do_expand)

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        async_with_compute_stream=False, allocate_on_comm_stream=False, defer_epilogue=False,
    ):  # fmt: skip
        return self._combine(x, handle, topk_weights, bias)


class ElasticBuffer(_Elastic):
    max_slots_per_rank = 256

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        self.group, self.deterministic = group, deterministic
        self.num_max_tokens_per_rank = num_max_tokens_per_rank

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
        handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        if do_handle_copy and topk_idx is not None:
            topk_idx = topk_idx.clone()
        most = num_max_tokens_per_rank
        return self._dispatch(x, topk_idx, topk_weights, num_experts, most, handle, do_cpu_sync, do_expand)

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        return self._combine(x, handle, topk_weights, bias)
