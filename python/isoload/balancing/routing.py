"""The third stage: the slot of every token copy on this rank."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload import ops
from isoload.balancing.planning import share_routed
from isoload.checks import values_readable
from isoload.ops import Counted, Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies import Policy, Seeded, StaticPolicy, sample_seed
from isoload.policies.plan import Plan, check_shared_columns

FIXED = StaticPolicy()


def route(
    topk_ids: Tensor,
    loads: Tensor,
    plan: Plan,
    rank: int,
    *,
    order: Order = "locality",
) -> Tensor:
    """Send every copy on this rank to a slot; over all ranks slot p receives exactly ``plan.quota[p]`` copies.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts of this rank's tokens; -1 = masked. With n shared experts the
            last n columns are theirs (:func:`isoload.ops.append_shared_expert`).
        loads: [R, E] int32, those of the plan; row ``rank`` is ``count(topk_ids, E)``.
        plan: of one layer. A sampled plan draws each copy's replica from its weights.
        rank: this rank.
        order: of the share, see :func:`share`.

    Returns:
        [T, K] in the dtype of topk_ids, -1 where masked: DeepEP's ``topk_idx``.
    """
    num_shared = plan.placed.num_shared
    if num_shared:
        check_shared_columns(topk_ids, plan.placed.host.num_routed, num_shared)
    counted = ops.count(topk_ids, plan.tables.num_experts + num_shared)
    return route_counted(counted, loads, plan, rank, order=order)


def route_counted(
    counted: ops.Counted,
    loads: Tensor,
    plan: Plan,
    rank: int,
    *,
    send_counts: Tensor | None = None,
    order: Order = "locality",
) -> Tensor:
    """Run :func:`route` on ids whose shared columns are checked; the rank's send_counts replace its share."""
    if plan.layer is None:
        raise ValueError("plan must be of one layer (plans[layer]), got a plan of all layers")
    if counted.ids.device != plan.bound.device:
        raise ValueError(
            f"topk_ids must be on the plan's device {plan.bound.device}, got {counted.ids.device}"
        )
    placed, policy, columns = plan.placed, plan.policy, None
    if placed.num_shared and plan.weights is None:
        columns = shared_columns(plan, rank)
    if placed.num_shared and columns is None:
        counted = counted.routed(placed.num_shared)
    if plan.weights is not None:
        if not 0 <= rank < plan.tables.num_ranks:
            raise ValueError(f"rank must be in 0..{plan.tables.num_ranks - 1}, got {rank}")
        weights = policy.weights_of(plan, rank) if isinstance(policy, Seeded) else plan.weights
        slots = ops.route_sampled(counted.ids, weights, plan.tables, *sample_seed(plan, rank), rank)
    else:
        send_counts = share_routed(loads, plan, rank, order) if send_counts is None else send_counts
        slots = ops.route(counted, send_counts, plan.tables, columns)
    if not placed.num_shared or columns is not None:
        return slots
    ranks = policy.route_shared(slots, plan, rank)
    return torch.cat([slots, shared_slots(ranks, placed).to(slots.dtype)], dim=1)


def shared_columns(plan: Plan, rank: int) -> ops.SharedColumns | None:
    """Return where a source rank's shared copies go, as route_shared takes it; None if the policy has its own rule."""
    if type(plan.policy).route_shared is not Policy.route_shared:
        return None
    assert plan.shared is not None
    placed, by_rank = plan.placed, plan.shared.by_rank
    row = None if by_rank is None else by_rank.select(0, rank)
    home = placed.home_rank(rank) if row is None else rank
    return ops.SharedColumns(placed.num_shared, placed.first_shared, home, row)


def route_sent(counted: Counted, send_counts: Tensor, placed: PlacedLayers, rank: int) -> Tensor:
    """Return the slot of every copy on a rank that sends [P] copies to each slot; shared copies stay on the rank."""
    num_shared, columns = placed.num_shared, None
    if num_shared:
        columns = ops.SharedColumns(num_shared, placed.first_shared, placed.home_rank(rank))
    return ops.route(counted, send_counts, placed.tables, columns)


def route_fixed(topk_ids: Tensor, placed: PlacedLayers, rank: int) -> Tensor:
    """Return the [T, K] slot of every copy on this rank without a plan and without loads. A routed expert uses the
    replica that policy ``static`` would use; shared experts stay on the token's rank. For layers without freedom, and
    for batches too small to plan."""
    num_experts = placed.host.num_experts
    if values_readable(topk_ids) and topk_ids.numel():
        low, high = (int(v) for v in torch.aminmax(topk_ids))
        if low < -1 or high >= num_experts:
            bad = low if low < -1 else high
            raise ValueError(f"topk_ids must be in -1..{num_experts - 1}, got {bad}")
    slots = fixed_slots(placed, rank)
    index = topk_ids.long()
    valid = (index >= 0) & (index < num_experts)
    return torch.where(valid, slots[index.clamp(0, num_experts - 1)], -1).to(topk_ids.dtype)


def fixed_slots(placed: PlacedLayers, rank: int) -> Tensor:
    """Return the [E] int64 slot that a rank uses for every expert in :func:`route_fixed`, shared experts included."""
    slots = FIXED.slots(placed).select(-2, rank)
    if placed.shared_home is None:
        return slots
    home = shared_slots(placed.shared_home[rank].expand(1, placed.num_shared), placed)
    return torch.cat([slots, home.flatten()])


def fixed_copies(counts: Tensor, placed: PlacedLayers, rank: int) -> Tensor:
    """Return the [R] int64 copies that :func:`route_fixed` sends to every rank, from a rank's counts [E]."""
    ranks = fixed_slots(placed, rank) // placed.host.slots_per_rank
    copies = counts.new_zeros(placed.topology.num_ranks, dtype=torch.int64)
    return copies.scatter_add_(0, ranks, counts.long())


def shared_slots(ranks: Tensor, placed: PlacedLayers) -> Tensor:
    """Return the [T, n] slots of the shared experts on the given ranks [T, n]; -1 stays -1."""
    place = torch.arange(placed.num_shared, device=ranks.device) + placed.first_shared
    return torch.where(ranks < 0, -1, ranks * placed.host.slots_per_rank + place)
