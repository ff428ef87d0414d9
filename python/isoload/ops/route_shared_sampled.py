"""route_shared_sampled: the rank of every shared copy, drawn as Waterfill was published; wrapper and fake."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from isoload.ops.library import call, ints, op

SharedRule = Literal["static", "dynamic", "blog", "blog_all"]

_route_shared_sampled = op("route_shared_sampled", lambda a: ints(a.slots, a.slots.shape[0], 1))


def route_shared_sampled(
    slots: Tensor,
    load: Tensor,
    tokens: Tensor | None,
    slots_per_rank: int,
    rank: int,
    rule: SharedRule,
    seed: int = 0,
    step: Tensor | None = None,
) -> Tensor:
    """Draws the rank that computes each token's shared expert, as Waterfill was published (papers/001).

    For comparison: a draw meets no quota. Every rank below a target is drawn in proportion to its slack
    target - load; the own rank is preferred 11 to 10. Where no candidate has a weight, the own rank keeps the
    copy unless a candidate's load times 11 is below the kept one's times 10. Candidates are compared in rank order;
    visited ones of dynamic in the order of the token's slots, as SGLang does.

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
        rule: "static", "dynamic", "blog", or "blog_all": blog with all ranks as candidates.
        seed: 64-bit, used by blog and blog_all only.
        step: the batch's number on the device, see :func:`isoload.ops.route_sampled`; the stream is then that of seed,
            step and rank.

    Returns:
        [T, 1] int32; -1 for a token without a routed copy.
    """
    seed = (seed + 2**63) % 2**64 - 2**63
    return call(_route_shared_sampled, slots, load, tokens, slots_per_rank, rank, rule, seed, step)
