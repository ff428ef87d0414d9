"""The third stage: the slot of every token copy on this rank."""

from __future__ import annotations

from torch import Tensor

from isoload import ops
from isoload.ops import Order, Prefer
from isoload.planning import share
from isoload.records import Plan

GOLDEN = 0x9E3779B97F4A7C15  # spreads layer, step and rank over the 64-bit seeds of sampled routes


def route(
    topk_ids: Tensor,
    loads: Tensor,
    plan: Plan,
    rank: int,
    *,
    prefer: Prefer | None = None,
    order: Order = "locality",
) -> Tensor:
    """Sends every copy on this rank to a slot; over all ranks slot p receives exactly ``plan.quota[p]`` copies.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts of this rank's tokens; -1 = masked.
        loads: [R, E] int32, those of the plan; row ``rank`` is ``count(topk_ids, E)``.
        plan: of one layer. A sampled one draws each copy's replica from its weights instead.
        rank: this rank.
        prefer: "visited" lets more of a token's copies meet on one rank, inside the same share.
        order: of the share, see :func:`share`.

    Returns:
        [T, K] in the dtype of topk_ids, -1 where masked: DeepEP's ``topk_idx``.
    """
    if plan.layer is None:
        raise ValueError("plan must be of one layer (plans[layer]), got a plan of all layers")
    if topk_ids.device != plan.bound.device:
        raise ValueError(f"topk_ids must be on the plan's device {plan.bound.device}, got {topk_ids.device}")
    if plan.weights is not None:
        return ops.route_sampled(topk_ids, plan.weights, plan.tables, sample_seed(plan, rank))
    return ops.route(topk_ids, share(loads, plan, rank, order), plan.tables, prefer)


def sample_seed(plan: Plan, rank: int) -> int:
    """The random stream of one rank, layer and step of a sampled policy."""
    seed = getattr(plan.policy, "seed", 0)
    for part in (plan.layer or 0, getattr(plan.policy, "step", 0), rank):
        seed = ((seed + part + 1) * GOLDEN) % 2**64
        seed ^= seed >> 31
    return seed
