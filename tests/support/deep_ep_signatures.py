"""What the doubles of DeepEP stand for: the arguments of the wheels' methods, and the versions they were read from."""

VERSIONS = {"sgl-deep-ep-v25": "0.1.0rc0", "sgl-deep-ep": "0.1.2.post1"}

SIGNATURES = {
    "sgl-deep-ep-v25": {
        "EPBuffer.__init__": (
            "self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
            "use_fp8_dispatch=False, lb_allocation_plan_or_num_bytes=0, deterministic=False, "
            "allow_hybrid_mode=True, allow_multiple_reduction=True, prefer_overlap_with_compute=True, "
            "sl_idx=None, num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, "
            "explicitly_destroy=False"
        ),
        "EPBuffer.combine": (
            "self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None, "
            "async_with_compute_stream=False, allocate_on_comm_stream=False, defer_epilogue=False"
        ),
        "EPBuffer.dispatch": (
            "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
            "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, "
            "previous_event=None, async_with_compute_stream=False, allocate_on_comm_stream=False, "
            "handle=None, do_handle_copy=False, do_cpu_sync=None, do_expand=False, do_zero_padding=False, "
            "use_tma_aligned_col_major_sf=False, defer_epilogue=False"
        ),
        "EPBuffer.get_theoretical_num_sms": (
            "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=0, "
            "sm_write_gbs=0"
        ),
        "EPBuffer.lb_prefetch_weights": (
            "self, redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, "
            "previous_event=None"
        ),
        "EPBuffer.lb_reduce_grads": (
            "self, redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, previous_event=None"
        ),
    },
    "sgl-deep-ep": {
        "ElasticBuffer.__init__": (
            "self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
            "use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, "
            "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, "
            "num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False"
        ),
        "ElasticBuffer.combine": (
            "self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None, "
            "previous_event_before_epilogue=None, async_with_compute_stream=False, "
            "allocate_on_comm_stream=False"
        ),
        "ElasticBuffer.dispatch": (
            "self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
            "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, "
            "previous_event=None, previous_event_before_epilogue=None, async_with_compute_stream=False, "
            "allocate_on_comm_stream=False, handle=None, do_handle_copy=True, do_cpu_sync=None, "
            "do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False"
        ),
        "ElasticBuffer.get_theoretical_num_sms": (
            "self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=200, "
            "sm_write_gbs=50"
        ),
        "Buffer.__init__": (
            "self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
            "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=None, "
            "explicitly_destroy=False, enable_shrink=False, comm=None"
        ),
        "Buffer.combine": (
            "self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, "
            "async_finish=False, allocate_on_comm_stream=False"
        ),
        "Buffer.dispatch": (
            "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
            "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
            "expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None, async_finish=False, "
            "allocate_on_comm_stream=False"
        ),
        "Buffer.get_combine_config": "num_ranks",
        "Buffer.get_dispatch_config": "num_ranks",
        "Buffer.get_dispatch_layout": (
            "self, topk_idx, num_experts, previous_event=None, async_finish=False, "
            "allocate_on_comm_stream=False"
        ),
        "Buffer.get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
        "Buffer.low_latency_combine": (
            "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
            "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, "
            "src_signals=None, src_signal_expect_value=0"
        ),
        "Buffer.low_latency_dispatch": (
            "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
            "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, "
            "x_global_scale=None, use_fp8=True, round_scale=False, use_ue8m0=False, use_nvfp4=False, "
            "async_finish=False, return_recv_hook=False"
        ),
    },
}

# Buffers that isoload accepts by their methods. UCCL-EP's is not in the wheel of PyPI (uccl 0.1.1): read from
# ep/bench/buffer.py of github.com/uccl-project/uccl at commit da914a2. NIXL-EP's is in the wheel of nixl-cu13 1.5.1.
OTHERS = {
    "UCCL-EP": {
        "Buffer.combine": (
            "self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, "
            "async_finish=False, allocate_on_comm_stream=False"
        ),
        "Buffer.dispatch": (
            "self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, "
            "is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None, "
            "expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None, async_finish=False, "
            "allocate_on_comm_stream=False"
        ),
        "Buffer.get_dispatch_layout": (
            "self, topk_idx, num_experts, previous_event=None, async_finish=False, "
            "allocate_on_comm_stream=False"
        ),
        "Buffer.low_latency_combine": (
            "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
            "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, "
            "packed_recv_count=None, comp_signal=None, block_m=64, threshold=0, num_sms=0, src_signals=None, "
            "src_signal_expect_value=0"
        ),
        "Buffer.low_latency_dispatch": (
            "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
            "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
            "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False"
        ),
    },
    "NIXL-EP": {
        "Buffer.combine": ("self, *args, **kwargs"),
        "Buffer.dispatch": ("self, *args, **kwargs"),
        "Buffer.get_dispatch_layout": (
            "self, topk_idx, num_experts, previous_event=None, async_finish=False, "
            "allocate_on_comm_stream=False"
        ),
        "Buffer.low_latency_combine": (
            "self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False, "
            "return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None"
        ),
        "Buffer.low_latency_dispatch": (
            "self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts=None, "
            "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, "
            "round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False"
        ),
    },
}
