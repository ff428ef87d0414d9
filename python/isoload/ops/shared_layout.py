"""Shared experts beside the routed ones: append_shared_expert, route_shared_sampled; wrappers and fakes."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from isoload.ops.library import call, library

SharedRule = Literal["static", "dynamic", "blog"]

_append_shared_expert = library.append_shared_expert.default
_route_shared_sampled = library.route_shared_sampled.default


def append_shared_expert(
    slots: Tensor,
    weights: Tensor,
    ranks: Tensor,
    routed_per_rank: int,
    slots_per_rank: int | None = None,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Adds a column per shared expert and makes room for its slot behind every rank's routed ones.

    Routed slot p becomes ``p // routed_per_rank * S + p % routed_per_rank``; shared expert j on rank r is slot
    ``r * S + routed_per_rank + j``. With one shared expert this is SGLang's layout (PR 20089). The same call
    appends the *logical* ids of shared experts: slots = logical ids, ranks = 0 and routed_per_rank = E give
    E..E+n-1 and leave the routed ids alone.

    Args:
        slots: [T, K] int32 or int64 routed slots, routed_per_rank on every rank; -1 = absent.
        weights: [T, K] float32 or float64 gate weights; may require grad.
        ranks: [T, n] int32, the rank that computes each of the token's n shared experts; -1 = none.
        routed_per_rank: routed slots per rank in the ids given.
        slots_per_rank: S of the ids returned. Default: routed_per_rank + n.
        weight: gate weight of every shared copy, a constant. A model that scales the sum of its experts by
            ``routed_scaling_factor`` afterwards wants 1 / that factor (1.0 if it is 0).

    Returns:
        slots [T, K + n] and weights [T, K + n] in the dtypes given. Absent copies weigh 0; a token without any
        routed copy is padding, its shared copies are absent too.
    """
    placed: tuple[Tensor, Tensor] = call(
        _append_shared_expert, slots, weights, ranks, routed_per_rank, slots_per_rank, weight
    )
    return placed


def route_shared_sampled(
    slots: Tensor,
    load: Tensor,
    tokens: Tensor | None,
    slots_per_rank: int,
    rank: int,
    rule: SharedRule,
    seed: int = 0,
) -> Tensor:
    """Draws the rank that computes each token's shared expert, as Waterfill was published (papers/001).

    For comparison: a draw meets no quota. Every rank below a target is drawn in proportion to its slack
    target - load; the own rank is preferred 11 to 10. Where no candidate has a weight, the own rank keeps the
    copy unless a candidate's load times 11 is below the kept one's times 10 (scanned in rank order).

    ========  =====================================  ============================  ==========================
    rule      load of rank r                         target: the mean, up, of      candidates
    ========  =====================================  ============================  ==========================
    static    load, counted on this rank only        loads + sum(load) // K        all
    dynamic   load of all ranks + tokens[r]          loads + sum(load) // K        all if no load is above the
                                                                                   target, else visited + own
    blog      load of all ranks                      loads + sum(tokens)           visited + own
    ========  =====================================  ============================  ==========================

    static and dynamic are SGLang's (PR 19290), without its two waits for the device and its limit of 32 ranks
    (here 1024). Fewer than 64 rows, padding included, stay at home. Weights are rounded down after the preference.
    Row i draws ``((i ^ rank * 0x9E3779B9) * 1664525 + 1013904223) mod 2^32 mod total``, the same in every layer and
    step: an arithmetic sequence, mostly evener than chance but far off the weights where the step and the total
    share factors. blog has no such gate, weighs own slack 11 and other slack 10, and row i draws word i of the
    stream ``seed`` (SplitMix64) mod total; the modulo's bias is below total / 2^64.

    Args:
        slots: [T, K] int32 or int64 routed slots; -1 = absent. K counts absent copies too.
        load: [R] int32 or int64 routed copies per destination rank: of this rank's tokens (static) or of all.
        tokens: [R] int32 tokens per source rank; may be None for static, which ignores it.
        slots_per_rank: S of the slots given.
        rank: this rank.
        rule: "static", "dynamic" or "blog".
        seed: 64-bit, used by blog only.

    Returns:
        [T, 1] int32; -1 for a token without a routed copy.
    """
    seed = (seed + 2**63) % 2**64 - 2**63
    ranks: Tensor = call(_route_shared_sampled, slots, load, tokens, slots_per_rank, rank, rule, seed)
    return ranks


@torch.library.register_fake("isoload::append_shared_expert")
def _(
    slots: Tensor,
    weights: Tensor,
    ranks: Tensor,
    routed_per_rank: int,
    slots_per_rank: int | None,
    weight: float,
) -> tuple[Tensor, Tensor]:
    shape = (slots.shape[0], slots.shape[1] + ranks.shape[1])
    return slots.new_empty(shape), weights.new_empty(shape)


def _save_slots(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _routed_gradient(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (slots,) = ctx.saved_tensors
    routed = gradient[:, : slots.shape[1]].masked_fill(slots < 0, 0)
    return None, routed, None, None, None, None


torch.library.register_autograd("isoload::append_shared_expert", _routed_gradient, setup_context=_save_slots)


@torch.library.register_fake("isoload::route_shared_sampled")
def _(
    slots: Tensor,
    load: Tensor,
    tokens: Tensor | None,
    slots_per_rank: int,
    rank: int,
    rule: str,
    seed: int,
) -> Tensor:
    return slots.new_empty((slots.shape[0], 1), dtype=torch.int32)
