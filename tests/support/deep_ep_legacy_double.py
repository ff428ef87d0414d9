"""DeepEP 1's Buffer on CPU over gloo, in its normal and its low-latency mode; see support.deep_ep_double."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from support.deep_ep_double import Event, local_ids, swap


class Buffer:
    """Rows by source rank, then token; sums by ascending rank."""

    num_sms = 20
    left = torch.nan  # what low latency leaves in places without a copy

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=None, explicitly_destroy=False,
        enable_shrink=False, comm=None,
    ):  # fmt: skip
        self.group, self.low_latency_mode = group, low_latency_mode

    @staticmethod
    def get_dispatch_config(num_ranks):
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, ranks: 1024 * row_bytes * ranks,
            get_rdma_buffer_size_hint=lambda row_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return 2 * num_max_dispatch_tokens_per_rank * hidden * num_experts

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        size = num_experts // self.group.size()
        owner = topk_idx.div(size, rounding_mode="floor")
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.group.size())], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, Event()

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            sent = [x[t] for t in handle["tokens"]]
            return (
                self._pad(torch.cat(swap(sent, self.group)), handle["rows"]),
                None,
                None,
                None,
                None,
                Event(),
            )
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        num_experts, num_ranks = len(num_tokens_per_expert), self.group.size()
        tokens = [column.nonzero().flatten() for column in is_token_in_rank.unbind(1)]
        rows, ids, weights = (swap([v[t] for t in tokens], self.group) for v in (x, topk_idx, topk_weights))
        local = local_ids(torch.cat(ids), self.group.rank(), num_experts // num_ranks)
        got = [len(piece) for piece in rows]
        num_rows = num_worst_tokens or sum(got)
        handle = {"tokens": tokens, "got": got, "rows": num_rows, "num_tokens": len(x)}
        gates = torch.cat(weights).masked_fill(local < 0, 0)
        padding = num_rows - sum(got)
        counts = (
            [] if num_worst_tokens else [int((local == e).sum()) for e in range(num_experts // num_ranks)]
        )
        return (
            self._pad(torch.cat(rows), num_rows),
            torch.cat([local, local.new_full((padding, local.shape[1]), -1)]),
            self._pad(gates, num_rows),
            counts,
            handle,
            Event(),
        )

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % 256 == 0

        def home(values, total):
            pieces = swap(list(values[: sum(handle["got"])].split(handle["got"])), self.group)
            for chosen, piece in zip(handle["tokens"], pieces, strict=True):
                total[chosen] += piece.float()
            return total

        total = torch.zeros(handle["num_tokens"], x.shape[1]) if bias is None else bias.float()
        weights = None
        if topk_weights is not None:
            weights = home(topk_weights, torch.zeros(handle["num_tokens"], topk_weights.shape[1]))
        return home(x, total).bfloat16(), weights, Event()

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None, x_global_scale=None, use_fp8=True, round_scale=False, use_ue8m0=False,
        use_nvfp4=False, async_finish=False, return_recv_hook=False,
    ):  # fmt: skip
        assert self.low_latency_mode and not use_fp8 and len(x) <= num_max_dispatch_tokens_per_rank
        num_ranks, rank, most = self.group.size(), self.group.rank(), num_max_dispatch_tokens_per_rank
        assert x.shape[1] % 128 == 0 and (num_ranks * most) % 4 == 0
        size = num_experts // num_ranks
        rows = x.new_full((size, num_ranks * most, x.shape[1]), self.left)
        counts, sources = torch.zeros(size, dtype=torch.int32), []
        for expert in range(size):
            sent = [(topk_idx == r * size + expert).any(1).nonzero().flatten() for r in range(num_ranks)]
            arrived = swap([x[t] for t in sent], self.group)
            sources.append(([len(piece) for piece in arrived], sent))
            counts[expert] = sum(map(len, arrived))
            rows[expert, : counts[expert]] = torch.cat(arrived)
        return rows, counts, (sources, rank), Event(), None

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False,
        return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, src_signals=None,
        src_signal_expect_value=0,
    ):  # fmt: skip
        sources, _ = handle
        total = torch.zeros(len(topk_idx), x.shape[2])
        for expert, (got, sent) in enumerate(sources):
            pieces = swap(list(x[expert, : sum(got)].split(got)), self.group)
            for rank, (chosen, piece) in enumerate(zip(sent, pieces, strict=True)):
                gate = (topk_weights * (topk_idx == rank * len(sources) + expert)).sum(1)[chosen]
                total[chosen] += piece.float() * gate.unsqueeze(1)
        return total.bfloat16(), Event(), None

    @staticmethod
    def _pad(values, num_rows):
        return torch.cat([values, values.new_full((num_rows - len(values), values.shape[1]), torch.nan)])
