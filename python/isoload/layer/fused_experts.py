"""The stacks and the activation of a transformers ``experts`` module, read by the flags that it carries.

Every module under transformers' ``use_experts_implementation`` says how its Parameters lie: ``is_transposed``,
``has_bias``, ``has_gate``, and computes what is between them in ``_apply_gate``. Shapes: E experts, H, I.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isoload.experts.weights import DTYPES, Activation, ClampedGLU, ExpertWeights, SwiGLU

STACKS = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIASES = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}


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
    probe = torch.linspace(-9, 9, 32).view(2, 16)
    with torch.no_grad():
        wanted = own(probe)
        for activation in known:
            if torch.allclose(activation(probe), wanted, rtol=1e-5, atol=1e-6):
                return activation
    return own
