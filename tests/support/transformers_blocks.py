"""Every MoE block of transformers: found in its sources, made in the smallest model that has it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

E, K, H = 8, 2, 32
SPARSE, FULL = ["sparse"] * 2, ["full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Every field of a configuration that has one of these names
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), K
    ),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "index_topk"), 16),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "pad_token_id"), 0),
    **{"hidden_size": H, "num_hidden_layers": 2, "vocab_size": 64, "mlp_layer_types": SPARSE},
    **{"mlp_only_layers": [], "enable_moe_block": True},
}
MORE: dict[str, dict[str, Any]] = {
    **{
        folder: {"layer_types": FULL}
        for folder in ("bailing_hybrid", "dots1", "kimi_linear", "lfm2_moe", "qwen3_5_moe", "qwen3_next")
    },
    "dbrx": {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": E}, "d_model": H},
    "dots3_note": {"adapter_in_dim": H, "adapter_input_size": H},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "gemma4": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0},
    "glm4v_moe": {
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
    },
    "glm5_next": {"index_kpool": 1, "qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 8},
    "granitemoehybrid": {"layers_block_type": ["attention"] * 2, "layer_types": FULL, "mamba_n_heads": 2},
    "hy_v4_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "jamba": {
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "mimo_v2_flash": {"num_attention_heads": 8},
    "muse_spark": {"moe_hidden_size": 16},
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 24},
    "qwen4_exp": {
        "layer_types": FULL,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "vitpose_backbone": {"part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def sources(kind: str) -> Iterator[Path]:
    """Of transformers' models: their "modeling" or "configuration" files."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return iter(sorted(Path(spec.origin).parent.glob(f"models/*/{kind}_*.py")))


def block_classes() -> dict[str, str]:
    """Class of every module that makes its own `experts` -> the model's folder. Nothing is imported."""
    found = {}
    for path in sources("modeling"):
        for text in path.read_text().split("\nclass ")[1:]:
            if re.search(r"self\.experts = [A-Z]\w+\(", text):
                found[text[: re.search(r"\W", text).start()]] = path.parent.name  # type: ignore[union-attr]
    return found


def folders_of_configurations() -> set[str]:
    """The models whose configuration counts experts."""
    counts = re.compile(r"^    \w*(?:num|n)_\w*experts: (?!.*_per_)", re.MULTILINE)
    return {path.parent.name for path in sources("configuration") if counts.search(path.read_text())}


def make(block: str, folder: str) -> nn.Module:
    """The first model of its folder that is small and has such a block, else the block alone; random weights."""
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(31)
    why = []
    for of in models_of(module):
        try:
            config = configuration(of.config_class, folder)
            with torch.device("meta"):
                shape = of(config)
            if of.main_input_name != "input_ids" or not blocks_of(shape, block):
                continue
            if sum(p.numel() for p in shape.parameters()) > 8e6:
                raise ValueError("it is large")
            model = randomised(of(config).eval(), block)
            run(model)
            return model
        except Exception as error:
            why.append(f"{of.__name__}: {type(error).__name__}: {error}")
    for of in [c for name, c in vars(module).items() if name.endswith("Config") and inspect.isclass(c)]:
        try:
            arguments = {"config": configuration(of, folder), "layer_idx": 0, "intermediate_size": 24}
            arguments |= {"ffn_dim": 24}
            made = getattr(module, block)
            wanted = inspect.signature(made.__init__).parameters
            return randomised(made(**{k: v for k, v in arguments.items() if k in wanted}).eval(), block)
        except Exception as error:
            why.append(f"{of.__name__}: {type(error).__name__}: {error}")
    raise LookupError(f"{block} is not made: " + "; ".join(why))


def run(model: Any) -> torch.Tensor:
    """The output of a model for six tokens, or of a block alone for six rows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        if "TalkerModel" in type(model).__name__:  # it has no embedding of input_ids
            found = model(inputs_embeds=torch.randn(1, 6, H, generator=generator), use_cache=False)[0]
        elif hasattr(model, "main_input_name"):
            found = model(torch.randint(1, 64, (1, 6), generator=generator), use_cache=False)[0]
        elif hasattr(model, "self_attn"):  # a layer: its experts alone
            rows = torch.randn(6, H, generator=generator)
            found = model.experts(rows, *model.router(rows)[:0:-1])
        else:
            found = model(torch.randn(1, 6, H, generator=generator))
    return found[0] if isinstance(found, tuple) else found


def models_of(module: Any) -> list[Any]:
    """Its model classes, those of text alone first."""
    from transformers import PreTrainedModel

    found = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, PreTrainedModel)]
    own = [c for c in found if c.__module__ == module.__name__ and c.config_class is not None]
    return sorted(own, key=lambda c: ("Model" not in c.__name__, "Text" not in c.__name__))


def configuration(of: Any, folder: str) -> Any:
    """The smallest."""
    fields = set(getattr(of, "__dataclass_fields__", ())) | set(getattr(of, "attribute_map", {}))
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    made = of(**{**sizes, **MORE.get(folder, {})})
    made._experts_implementation = "eager"  # the block's own loop
    return made


def blocks_of(model: nn.Module, name: str) -> list[Any]:
    """Its modules of a class of that name."""
    return [module for module in model.modules() if type(module).__name__ == name]


def randomised(model: nn.Module, block: str) -> nn.Module:
    """The blocks' biases, corrections and scales too, which begin as zeros and ones."""
    for module in blocks_of(model, block):
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.5)
            elif tensor.dim() == 2:  # DeepSeek-V4's experts by token
                tensor.copy_(torch.rand(len(tensor), E).argsort(1)[:, :K])
    return model
