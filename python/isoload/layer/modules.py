"""A Hugging Face MoE block's gate and experts, as MoE takes them, without importing transformers.

Blocks are known by class name. Versions of transformers keep the same values in different places, so each value is
looked for where any of them has it. Fused experts (transformers' ``use_experts_implementation``) say how their
Parameters lie: ``is_transposed``, ``has_bias``, ``has_gate``, and compute what is between them in ``_apply_gate``.
Shapes: E experts, H width of a row, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isoload.experts.weights import DTYPES, Activation, ClampedGLU, ExpertWeights, SwiGLU
from isoload.layer.routers import Gate, Router
from isoload.layer.stored import StoredExperts

STACKS = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIASES = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
PROJECTIONS = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))  # Mixtral's own names come second


def block_gate(block: nn.Module) -> Gate:
    """The gate of a known block, on its memory. Its weights stay in max(fp32, dtype): a bf16 block that rounds them may
    differ in the last bits.
    """
    check_known(block)
    return GATES[type(block).__name__](block)


def block_experts(block: nn.Module) -> tuple[ExpertWeights, Activation]:
    """The stacks [E, ...] of a block's experts, on its memory unless they are a list, and what is between them."""
    check_unwatched(block)
    has_module = isinstance(getattr(block, "experts", None), nn.Module)
    if has_module and is_fused(experts := own_experts(block)):
        check_fused(experts)
        own = dict(experts.named_parameters(recurse=False))
        names, stacks = saved_names(experts), fused_stacks(experts, own).stacks()
        dense = {name: train_as(stack, own[names[name]]) for name, stack in stacks.items()}
        return ExpertWeights(**dense), fused_activation(experts)
    check_known(block)
    if type(block).__name__ == "GptOssMLP":
        return _gpt_oss_experts(block)
    return _swiglu_stacks(block), SwiGLU()


def check_known(block: nn.Module) -> None:
    if (name := type(block).__name__) not in GATES:
        raise ValueError(f"block must be one of {', '.join(GATES)}, got {name}")


def train_as(stack: Tensor, *of: Tensor) -> nn.Parameter:
    """A stack as a Parameter that requires a gradient as the block's own do."""
    flags = [own.requires_grad for own in of]
    if any(flags) != all(flags):
        raise ValueError(
            "experts must all require gradients or none of them, as one Parameter holds a stack of them, got "
            f"{sum(flags)} of {len(flags)} matrices that do"
        )
    return nn.Parameter(stack.detach(), all(flags))


def own_experts(block: nn.Module) -> nn.Module:
    """A block's experts, as the model made them."""
    experts: nn.Module = _find(block, "experts")
    for name, module in experts.named_modules(prefix="experts"):
        if isinstance(module, StoredExperts):
            raise ValueError(
                f"block must be balanced once, got a {type(experts).__name__} in place of its experts"
            )
        # peft's name of what an adapter wraps
        if hasattr(module, "base_layer") or is_parametrized(module):
            raise ValueError(
                f"experts must have no adapters (LoRA): merge them first (merge_and_unload() of peft), or adapt other "
                f"modules, got {name} in a {type(module).__name__}"
            )
    return experts


def _softmax_gate(block: nn.Module, renormalise: bool | None = None) -> Gate:
    """Qwen3-MoE and OLMoE, which may renormalise, and Mixtral, which always does."""
    noise = getattr(block, "jitter_noise", 0)
    if noise:
        raise ValueError(f"block.jitter_noise must be 0, got {noise}")
    if renormalise is None:
        renormalise = bool(_find(block, "gate.norm_topk_prob", "norm_topk_prob"))
    weight = _find(block, "gate.weight")
    return Gate(Router(len(weight), _find(block, "gate.top_k", "top_k"), renormalise=renormalise), weight)


def _deepseek_v3_gate(block: nn.Module) -> Gate:
    weight = _find(block, "gate.weight")
    router = Router(
        len(weight),
        _find(block, "gate.top_k", "top_k"),
        "sigmoid",
        renormalise=bool(_find(block, "gate.norm_topk_prob", "norm_topk_prob")),
        routed_scaling_factor=_find(block, "gate.routed_scaling_factor", "routed_scaling_factor"),
        num_groups=_find(block, "gate.num_group", "gate.n_group", "n_group"),
        top_groups=_find(block, "gate.topk_group", "topk_group"),
    )
    score_bias = _find(block, "gate.e_score_correction_bias").detach()
    return Gate(router, weight, score_bias=score_bias, project_in_fp32=True)


def _gpt_oss_gate(block: nn.Module) -> Gate:
    weight, bias = _find(block, "router.weight"), _find(block, "router.bias")
    return Gate(Router(len(weight), _find(block, "router.top_k"), "topk_softmax"), weight, bias)


def _gpt_oss_experts(block: nn.Module) -> tuple[ExpertWeights, Activation]:
    own_experts(block)
    gate_up, down = _find(block, "experts.gate_up_proj"), _find(block, "experts.down_proj")
    dense = ExpertWeights(
        train_as(gate_up.mT, gate_up),  # the block multiplies from the other side
        train_as(down.mT, down),
        _find(block, "experts.gate_up_proj_bias"),
        _find(block, "experts.down_proj_bias"),
    )
    return dense, ClampedGLU(_find(block, "experts.alpha"), _find(block, "experts.limit"))


# By class of transformers' block; each is compared with the block's own router in tests/layer/test_gates.py.
SOFTMAX = ("Qwen3Moe", "Qwen2Moe", "Qwen3Next", "Qwen3OmniMoeThinkerText", "Olmoe", "FlexOlmo")
RENORMALISED = ("Mixtral", "Qwen3_5Moe", "Qwen3VLMoeText", "MiniMax")
SIGMOID = (
    "DeepseekV3",
    "DeepseekV32",
    "Glm4Moe",
    "Glm4MoeLite",
    "Glm4vMoeText",
    "GlmMoeDsa",
    "KimiLinear",
    "SolarOpen",
)
GATES: dict[str, Callable[[nn.Module], Gate]] = {
    **{f"{model}SparseMoeBlock": _softmax_gate for model in SOFTMAX},
    **{f"{model}SparseMoeBlock": partial(_softmax_gate, renormalise=True) for model in RENORMALISED},
    **{f"{model}MoE": _deepseek_v3_gate for model in SIGMOID},
    "GptOssMLP": _gpt_oss_gate,
}


def _swiglu_stacks(block: nn.Module) -> ExpertWeights:
    """gate_up [E, 2I, H] and down [E, H, I] of experts whose activation is found to be SiLU."""
    experts = own_experts(block)
    if not isinstance(experts, nn.ModuleList):
        _check_silu(_find(block, "experts.act_fn"))
        return ExpertWeights(_find(block, "experts.gate_up_proj"), _find(block, "experts.down_proj"))
    matrices: list[tuple[Tensor, ...]] = []
    for i, expert in enumerate(experts):
        _check_silu(_find(block, f"experts.{i}.act_fn"))
        layers = [_find(block, *(f"experts.{i}.{name}" for name in names)) for names in PROJECTIONS]
        if any(layer.bias is not None for layer in layers):
            raise ValueError(f"block.experts.{i} must have no biases, got {expert}")
        matrices.append(tuple(layer.weight for layer in layers))
    with torch.no_grad():
        gate_up = torch.stack([torch.cat([gate, up]) for gate, up, _ in matrices])
        stacked = torch.stack([down for _, _, down in matrices])
    gates_ups = [weight for pair in matrices for weight in pair[:2]]
    return ExpertWeights(train_as(gate_up, *gates_ups), train_as(stacked, *(down for _, _, down in matrices)))


def _check_silu(function: Callable[[Tensor], Tensor]) -> None:
    """By its values: the class behind "silu" has changed between versions."""
    probe = torch.linspace(-4, 4, 9)
    if not torch.allclose(function(probe), F.silu(probe)):
        raise ValueError(f"act_fn must be SiLU, got {function}")


def _find(block: nn.Module, *paths: str) -> Any:
    """The first of the dotted paths that the block has."""
    for path in paths:
        try:
            return attrgetter(path)(block)
        except AttributeError:
            continue
    raise ValueError(f"block must have {' or '.join(paths)}, got a {type(block).__name__} without")


def is_fused(experts: nn.Module) -> bool:
    """Whether a module carries transformers' flags."""
    return hasattr(experts, "is_transposed") and hasattr(experts, "has_bias")


def check_unwatched(block: nn.Module) -> None:
    """Raises ValueError if a Recorder watches a block's experts, which run no more once isoload has taken them over."""
    experts = getattr(block, "experts", None)
    hooks = experts._forward_pre_hooks.values() if isinstance(experts, nn.Module) else ()
    if watched := [hook.watches for hook in hooks if hasattr(hook, "watches")]:
        raise ValueError(
            "experts must not be watched by a Recorder where isoload takes them over, it would see nothing: set the "
            f"layer's balancer.recorder, got a watch of layer {watched[0]}"
        )


def saved_names(experts: nn.Module) -> dict[str, str]:
    """The module's name of every stack."""
    return {**STACKS, **(BIASES if experts.has_bias else {})}


def check_fused(experts: nn.Module) -> None:
    """Raises ValueError if a module's experts are none that MoE can compute."""
    name = type(experts).__name__
    flags = {"has_gate": True, "has_post_expert_norm": False}
    missing = [flag for flag in (*flags, "is_transposed", "has_bias") if not hasattr(experts, flag)]
    if missing:
        raise ValueError(f"experts must be a fused module of transformers, got {name} without {missing[0]}")
    for flag, wanted in flags.items():
        if getattr(experts, flag) != wanted:
            raise ValueError(f"experts.{flag} must be {wanted}, got {getattr(experts, flag)} in {name}")
    for stack in saved_names(experts).values():
        found = getattr(experts, stack, None)
        if not isinstance(found, Tensor) or found.dtype not in DTYPES:
            kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"experts.{stack} must be a Parameter of float64, float32, bfloat16 or float16, got {kind} in {name}"
            )


def fused_stacks(experts: nn.Module, parameters: Mapping[str, Tensor]) -> ExpertWeights:
    """Views [E, ...] of a module's Parameters, a row per output, whichever way they lie."""

    def view(stack: Tensor) -> Tensor:
        return stack.transpose(1, 2) if experts.is_transposed and stack.dim() == 3 else stack

    return ExpertWeights(**{name: view(parameters[own]) for name, own in saved_names(experts).items()})


def fused_activation(experts: Any) -> Activation:
    """One that isoload has kernels for where the values are the same, else the module's own function."""
    own: Activation = experts._apply_gate
    known: list[Activation] = [SwiGLU()]
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        known.append(ClampedGLU(float(experts.alpha), float(experts.limit)))
    probe = probe_pairs()
    with torch.no_grad():
        wanted = own(probe)
        for activation in known:
            if torch.allclose(activation(probe), wanted, rtol=1e-5, atol=1e-6):
                return activation
    return own


def probe_pairs() -> Tensor:
    """Gate and up of every sign and of sizes beyond any limit that clamps them, side by side, then interleaved."""
    size = torch.logspace(-2, 15, 52)  # a product stays finite in float32
    values = torch.cat([-size.flip(0), torch.zeros(1), size])
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return torch.cat([torch.cat([gate, up], dim=1), torch.stack([gate, up], dim=2).flatten(1)])
