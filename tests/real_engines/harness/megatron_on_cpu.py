"""Megatron-Core's MoE layer on a CPU: stand-ins for what it takes from CUDA or Transformer Engine."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 16, 24


class Stream:
    """Of a device that has no streams."""

    def record_event(self) -> Stream:
        return self

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's makes an array of a CUDA tensor only, and hands the exchange a CPU tensor as its split sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def stand_in() -> None:
    """To be called once in a process, before a layer is made."""
    moe_utils.te_general_gemm = (
        None  # else a NameError in RouterGatingLinearFunction without Transformer Engine
    )
    token_dispatcher.maybe_move_tensor_to_cpu = on_host
    torch.cuda.current_device = lambda: torch.device("cpu")  # where the router moves its weight
    torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment]


stream = Stream()


def join(ranks: int) -> None:
    """Megatron's groups over the default group, all ranks one expert-parallel group."""
    stand_in()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)


def make_layer(dispatcher: str, ranks: int, **options: Any) -> MoELayer:
    """A layer with the local spec; the same router on all ranks, skewed, and experts of this rank's own."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=INNER,
        ffn_hidden_size=INNER,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=ranks,
        use_cpu_initialization=True,
        **{
            "add_bias_linear": False,
            "moe_router_load_balancing_type": "none",
            "bias_activation_fusion": False,
        }
        | options,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    layer = (
        spec(config) if isinstance(spec, partial) else build_module(spec, config)
    )  # 0.18 returns a partial
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        router = torch.randn(EXPERTS, HIDDEN, generator=draw)
        router[:3] *= 3  # these get most tokens
        layer.router.weight.copy_(router)
        if layer.router.bias is not None:
            layer.router.bias.zero_()  # drawn by Megatron, from another state in every layer
        draw = torch.Generator().manual_seed(10 + parallel_state.get_expert_model_parallel_rank())
        for parameter in layer.experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return layer
