"""A Hugging Face MoE block's gate and experts, as MoE takes them, without importing transformers.

Blocks are known by their parts, not by their names, so that all doors take the same ones. Experts that transformers
fuses (``use_experts_implementation``) say how their Parameters lie, ``is_transposed``, ``has_bias``, ``has_gate``, and
compute what is between them in ``_apply_gate``. A gate is the block's own router: its values are the model's.
Shapes: T tokens, K experts per token, E experts, H width of a row, I intermediate width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isoload.layer.stored import StoredExperts
from isoload.weights.experts import DTYPES, Activation, ClampedGLU, ExpertWeights, SwiGLU

STACKS = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIASES = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
ROUTERS = ("gate", "router")  # a block's names of its router
SCORE_BIASES = ("e_score_correction_bias", "expert_bias")  # of the block, that a router takes beside rows
BY_SEQUENCE = ("AfmoeTokenChoiceRouter",)  # routers that take [1, T, H]; most others would mix its first two
NOISE = ("jitter_noise", "input_jitter_noise", "router_jitter_noise")


class BlockGate:
    """A block's own router as a gate: rows [T, H] -> ids [T, K] and weights [T, K], those that its experts get.

    The router's hooks do not run: by them transformers would record router logits twice.

    Raises:
        ValueError: the router takes more than rows and a bias of the block. In a call: it adds noise in training, or
            its answer is another.
    """

    def __init__(self, block: nn.Module) -> None:
        name = type(block).__name__
        routers = [r for r in (getattr(block, n, None) for n in ROUTERS) if isinstance(r, nn.Module)]
        if not routers:
            raise ValueError(f"block must have a {' or '.join(ROUTERS)} to read, got a {name} without")
        self.block, self.router = block, routers[0]
        _, *self.takes = inspect.signature(self.router.forward).parameters
        if others := [taken for taken in self.takes if taken not in SCORE_BIASES]:
            raise ValueError(
                f"router must choose by rows and a bias of the block alone, got a {type(self.router).__name__} in "
                f"{name}, which takes {', '.join(others)}"
            )

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        noise = {n: getattr(m, n) for m in (self.block, self.router) for n in NOISE if getattr(m, n, 0)}
        if noise and self.block.training:
            raise ValueError(
                f"block must be in eval mode where training adds noise to its rows, got {noise} in "
                f"{type(self.block).__name__}"
            )
        given = rows[None] if type(self.router).__name__ in BY_SEQUENCE else rows
        answer = self.router.forward(given, *(getattr(self.block, taken, None) for taken in self.takes))
        weights, ids = answer[1:3] if isinstance(answer, tuple) and len(answer) > 2 else (rows, rows)
        of_each = ids.dim() == 2 and len(ids) == len(rows) and ids.shape == weights.shape
        if ids.dtype not in (torch.int32, torch.int64) or not of_each:
            raise ValueError(
                "router must answer logits, weights [T, K] and ids [T, K], got something else of "
                f"{type(self.router).__name__} in {type(self.block).__name__}"
            )
        return ids, weights


def block_experts(block: nn.Module) -> tuple[ExpertWeights, Activation]:
    """The stacks [E, ...] of a block's fused experts, on its memory, and what is between them."""
    check_unwatched(block)
    experts = own_experts(block)
    check_fused(experts)
    own = dict(experts.named_parameters(recurse=False))
    names, stacks = saved_names(experts), fused_stacks(experts, own).stacks()
    dense = {
        name: nn.Parameter(stack.detach(), own[names[name]].requires_grad) for name, stack in stacks.items()
    }
    return ExpertWeights(**dense), fused_activation(experts)


def own_experts(block: nn.Module) -> nn.Module:
    """A block's experts, as the model made them."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        raise ValueError(f"block must have experts, got a {type(block).__name__} without")
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
    stacks = list(saved_names(experts).values())
    if strays := [own for own, _ in experts.named_parameters() if own not in stacks]:
        raise ValueError(
            f"experts must have no Parameters but {', '.join(stacks)}, got {strays[0]} in {name}"
        )
    for stack in stacks:
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
    # The function holds what it belongs to, which must not be the weights that isoload replaces. FSDP's classes have no
    # copy.copy.
    bare = object.__new__(type(experts))
    bare.__dict__ = {**vars(experts), "_parameters": dict.fromkeys(experts._parameters)}
    own: Activation = bare._apply_gate
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
    size = torch.logspace(-2, 15, 52, dtype=torch.float32, device="cpu")  # products of two stay finite
    values = torch.cat([-size.flip(0), size.new_zeros(1), size])
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return torch.cat([torch.cat([gate, up], dim=1), torch.stack([gate, up], dim=2).flatten(1)])
