"""Small models of Hugging Face with MoE blocks, and the same on virtual ranks, for tests."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import isoload

EXPERTS, TOP_K = 8, 2
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 24, "num_experts_per_tok": TOP_K, "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", "Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 24, "head_dim": 8}),
    "olmoe": ("olmoe", "Olmoe", {"num_experts": EXPERTS}),
    "mixtral": ("mixtral", "Mixtral", {"num_local_experts": EXPERTS}),
    "gpt_oss": ("gpt_oss", "GptOss", {"num_local_experts": EXPERTS, "head_dim": 8}),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 2,
            "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        },
    ),
}  # fmt: skip


def make_model(name: str, **sizes: Any) -> Any:
    """A tiny random model, the same for the same name and sizes."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, prefix, more = MODELS[name]
    modeling = import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(import_module(f"transformers.models.{model}.configuration_{model}"), f"{prefix}Config")
    torch.manual_seed(3)
    built = getattr(modeling, f"{prefix}ForCausalLM")(config(**{**SIZES, **more, **sizes}))
    for parameter in built.parameters():
        parameter.data.normal_(std=0.2)
    return built.eval()


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "experts")]


def balanced(name: str, **how: Any) -> tuple[torch.nn.Module, list[isoload.MoE]]:
    """A model on four virtual ranks with replicas."""
    model, topology = make_model(name), isoload.Topology(4)
    num_blocks = len(blocks(model))
    placement = isoload.place(
        torch.arange(EXPERTS).repeat(num_blocks, 1) ** 2 + torch.arange(num_blocks)[:, None],
        topology,
        slots_per_rank=3,
    )
    return model, isoload.balance(model, topology, placement=placement, **how)
