"""An SGLang plug-in of the tests: what a real engine needs to run with ep_size > 1 on a CPU without AMX kernels, and a
record of the slots that every layer's copies went to, taken after SGLang's own post-processing.

It is in every engine that the tests start, with isoload and without.
"""

import json
import mmap
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Called by the rebalancing and by the recorder before it is told to record; torch.cpu lacks two of them.
    for name in ("empty_cache", "synchronize", "is_current_stream_capturing"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_: None)
    ops = ModuleType("vllm._custom_ops")  # where SGLang takes one kernel from on a CPU without AMX
    ops.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    sys.modules.setdefault("vllm", ModuleType("vllm"))
    sys.modules.setdefault("vllm._custom_ops", ops)
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    HookRegistry.register("sglang.srt.utils.common.get_device", lambda *_, **__: "cpu", HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native", experts, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher", dispatcher, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.forward_impl", experts_over_gloo, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.forward_cutlass_w4afp8",
        deepep_experts,
        HookType.REPLACE,
    )
    for_data_parallel_attention()
    if os.environ.get("ENGINE_LP") == "1":
        from sglang.srt.eplb import lplb_solver

        # Its ranks without tokens join the gather as DeepSeek's do; SGLang lists models that it has validated.
        lplb_solver._LPLB_SUPPORTED_MODEL_ARCHS |= {"Qwen3MoeForCausalLM"}
    if os.environ.get("ISOLOAD_SGLANG") == "1":
        HookRegistry.register("isoload.balancing.balancer.Balancer.exchange", say_exchange, HookType.AROUND)
    if "ISOLOAD_SPARE_SLOTS" in os.environ:
        target = "isoload.engines.sglang.borrowing.Spare.__call__"
        HookRegistry.register(target, record_fill, HookType.AROUND)
    if "ENGINE_PAGES" in os.environ:
        sys.path.append(str(Path(__file__).parents[2]))  # tests, for support
        HookRegistry.register("isoload.engines.sglang.pages.into_pages", record_pages, HookType.AROUND)
        HookRegistry.register("isoload.engines.sglang.pages.update_weights", record_moves, HookType.AROUND)
    if "ENGINE_GPU_PAGES" in os.environ:
        over_gpu_pages()
    if os.environ.get("ENGINE_DRAWN") == "1":
        HookRegistry.register("isoload.placers.eplb.hottest_layers", drawn_layers, HookType.REPLACE)
    if "ENGINE_FLIP" in os.environ:
        HookRegistry.register(
            "sglang.srt.eplb.expert_location_updater._update_expert_weights", flip_a_bit, HookType.AROUND
        )
    if os.environ.get("ENGINE_RECORD"):
        HookRegistry.register(
            "sglang.srt.layers.moe.topk._post_process_topk_ids", record_slots, HookType.AROUND
        )


def for_data_parallel_attention() -> None:
    """SGLang's own ways on a CPU, which it takes only where there are AMX kernels."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu, dp_attention.memcpy_func = True, dp_attention.memcpy_cpu
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def experts(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
    """SwiGLU experts of this rank; SGLang's own loop loses count where an id is -1, an expert of another rank."""
    weights, ids, _ = topk_output
    out = torch.zeros_like(x, dtype=torch.float32)
    for e in range(layer.w13_weight.shape[0]):
        row, k = (ids == e).nonzero(as_tuple=True)
        if len(row):
            gate, up = F.linear(x[row], layer.w13_weight[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, layer.w2_weight[e])
            out.index_add_(0, row, y.float() * weights[row, k, None].float())
    return out.to(x.dtype)


def dispatcher(original: Any, moe_runner_config: Any, quant_method: Any) -> Any:
    """With --moe-a2a-backend none, which is an option's word, SGLang's own; DeepEP's needs a GPU."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return (
        original(moe_runner_config, quant_method) if get_moe_a2a_backend().is_none() else ModuleType("none")
    )


def experts_over_gloo(layer: Any, hidden_states: Tensor, topk_output: Any) -> Tensor:
    """DeepEP's contract: every copy is computed where its slot lies, and a rank gets the sums of its own rows back."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().moe_ep_group.cpu_group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    given: list[Any] = [None] * ranks
    dist.all_gather_object(given, (hidden_states, topk_output.topk_ids, topk_output.topk_weights), group)
    x, ids, weights = (torch.cat(parts) for parts in zip(*given, strict=True))
    first, size = rank * layer.w13_weight.shape[0], layer.w13_weight.shape[0]
    here = torch.where((ids >= first) & (ids < first + size), ids - first, -1)
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, layer.forward_cutlass_w4afp8((x, (weights, here, None))), group)
    rows = [len(of_rank[0]) for of_rank in given]
    return sum(parts)[sum(rows[:rank]) : sum(rows[: rank + 1])]


def deepep_experts(layer: Any, dispatched: Any) -> Tensor:
    """One of the functions that compute experts behind DeepEP, which plug-ins wrap."""
    return experts(layer, *dispatched, None)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin: Tensor, is_neox: bool
) -> None:
    """Rotates queries and keys in place, as the kernel of this name does."""
    cos, sin = (part.unsqueeze(1).float() for part in cos_sin[positions.flatten()].chunk(2, -1))
    turned = 2 * cos.shape[-1]
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(states.shape[0], -1, head_size)
        x = heads[..., :turned].float()
        a, b = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
        pair = (a * cos - b * sin, b * cos + a * sin)
        x = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
        heads[..., :turned] = x.to(states.dtype)


def flip_a_bit(original: Any, **given: Any) -> Any:
    """Behind the weights' way of the third rebalance, the lowest bit of one weight: in ENGINE_FLIP's "rank layer slot",
    the slot by its number on the rank."""
    result = original(**given)
    FLIPPED["rebalances"] += 1
    rank, layer, slot = map(int, os.environ["ENGINE_FLIP"].split())
    if FLIPPED["rebalances"] == 3 and dist.get_rank() == rank:
        given["routed_experts_weights_of_layer"][layer][0][slot].view(torch.int32).view(-1)[7] ^= 1
    return result


FLIPPED = {"rebalances": 0}
DRAW = torch.Generator().manual_seed(5)


def drawn_layers(weight: Any, replicas: int, ranks: int) -> Any:
    """Return replicas of each layer that have nothing to do with loads, the same on all ranks."""
    of_slot = torch.randperm(ranks * len(weight), generator=DRAW)[: ranks * replicas] % len(weight)
    return torch.bincount(of_slot, minlength=len(weight)).int().numpy()


def record_pages(original: Any, runner: Any) -> None:
    """A line per rank when the model is loaded: the bytes that are in memory, and SGLang's own map."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    from isoload.engines.sglang import LAYERS

    original(runner)
    write_pages(LAYERS, get_global_expert_location_metadata().physical_to_logical_map_cpu)


def record_moves(original: Any, move: Any, **kwargs: Any) -> Any:
    """The same when the weights of some layers have moved."""
    from isoload.engines.sglang import LAYERS

    old, new = (kwargs[f"{name}_expert_location_metadata"] for name in ("old", "new"))
    table, layers = old.physical_to_logical_map_cpu.clone(), kwargs["update_layer_ids"]
    result = original(move, **kwargs)
    table[layers] = new.physical_to_logical_map_cpu[layers]
    write_pages(LAYERS, table)
    return result


def write_pages(layers: Any, table: Tensor) -> None:
    from support.pagemap import resident_by_layer

    pool = layers.pages
    size = pool.slot_bytes()
    if pool.on_gpu:
        (pages,) = pool._pages.values()
        resident = {
            layer: sum(map(pages.driver.pages_of, (paged.tensor for paged in tensors))) * pages.page_bytes
            for layer, tensors in pool.layers.items()
        }
    else:
        resident = resident_by_layer(pool)
    line = {"rank": layers.engine_rank(), "resident": resident, "size": size, "table": table.tolist()}
    with open(f"{os.environ['ENGINE_PAGES']}.{layers.engine_rank()}", "a") as file:
        print(json.dumps(line), file=file)


def over_gpu_pages() -> None:
    """Weights in pages as on a GPU, over a stand-in for the CUDA driver."""
    from isoload.weights.pages import GpuPages, PagePool
    from support.gpu_pages import StandIn

    pages = GpuPages(StandIn(page_bytes=mmap.PAGESIZE))
    PagePool._pages_of = lambda pool, device: pool._pages.setdefault(device, pages)  # type: ignore[method-assign]


def say_exchange(original: Any, balancer: Any, *others: Any) -> Any:
    """A line in the log."""
    print(f"exchange of {1 + len(others)} layers on rank {balancer.ranks[0]}", flush=True)
    return original(balancer, *others)


def record_slots(original: Any, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A line per layer and batch: logical ids in, slots out."""
    from sglang.srt.layers.moe import topk

    logical, cuda = topk_ids.clone(), topk._is_cuda
    topk._is_cuda = cuda or os.environ.get("ENGINE_LP") == "1"  # the only branch with a solver
    result = original(topk_ids, *args, **kwargs)
    topk._is_cuda = cuda
    layer = kwargs.get("layer_id", args[3] if len(args) > 3 else None)
    line = {"layer": layer, "ids": logical.tolist(), "slots": result[0].tolist()}
    with open(f"{os.environ['ENGINE_RECORD']}.{os.getpid()}", "a") as file:
        print(json.dumps(line), file=file)
    return result


def record_fill(original: Any, spare: Any, *args: Any) -> Tensor:
    """A line per layer and batch, before experts are computed: loads, experts in the slots, what has travelled."""
    before = spare.counts.tolist()[:5]  # the sixth differs between ranks
    slots: Tensor = original(spare, *args)
    of = spare.layer.balancer
    line = {
        "layer": of.layer, "tokens": len(args[0]), "borrows": of.policy.borrows, "loads": of.last_loads.sum(0).tolist(),
        "peak": int(of.last_plan.peak), "table": spare.filled.slot_to_expert.tolist(),
        "counts": [now - then for now, then in zip(spare.counts.tolist()[:5], before, strict=True)],
    }  # fmt: skip
    with open(f"{os.environ['ENGINE_RECORD']}_fills.{os.getpid()}", "a") as file:
        print(json.dumps(line), file=file)
    return slots
