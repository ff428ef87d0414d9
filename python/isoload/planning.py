"""The second stage: from gathered loads to a Plan, and from a Plan to each rank's share of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from isoload import ops
from isoload.ops import Order
from isoload.placement import PlacedLayers, Placement
from isoload.policies import Policy, make_policy
from isoload.records import Plan


def plan(
    loads: Tensor,
    placement: Placement | PlacedLayers,
    layer: int | None = None,
    policy: str | Policy = "exact",
    **options: Any,
) -> Plan:
    """Decides which replica computes how many copies, for one layer and batch.

    Args:
        loads: [E] or, where the policy or the route needs sources, [R, E]: int32 copies (see :func:`count`).
        placement: checked when it was made; or layers of one that a caller keeps on the loads' device.
        layer: position of the layer in the placement; None = all layers, as :func:`plan_layers`, or those kept.
        policy: a name in ``isoload.POLICIES``, or a Policy.
        **options: the policy's own, e.g. ``tolerance=0.002``.

    Returns:
        Plan with fields [P] and []; ``peak == bound`` proves optimality.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    if isinstance(placement, PlacedLayers):
        placed = placement
        if layer is not None:
            raise ValueError(f"layer must be None where the placement's layers are given, got {layer}")
        if loads.device != placed.home_slot.device:
            raise ValueError(f"loads must be on {placed.home_slot.device} as the layers, got {loads.device}")
    else:
        placed = placement.layers(loads.device) if layer is None else placement.layer(layer, loads.device)
    return _plan(loads, placed, make_policy(policy, options))


def own_layers(placed: PlacedLayers) -> PlacedLayers:
    """Layers with memory of their own, which :func:`refresh_layers` may write."""
    return replace(
        placed,
        slot_to_expert=placed.slot_to_expert.clone(),
        home_slot=placed.home_slot.clone(),
        tables=replace(placed.tables, data=placed.tables.data.clone()),
        cache={},
    )


def refresh_layers(own: PlacedLayers, placed: PlacedLayers) -> PlacedLayers:
    """Own layers with another placement's content, in the same memory: plans made from them before are void.

    What policies remember is forgotten, so what they derive next (``static``: its slots) has other memory.
    """
    own.slot_to_expert.copy_(placed.slot_to_expert)
    own.home_slot.copy_(placed.home_slot)
    own.tables.data.copy_(placed.tables.data)
    return replace(own, host=placed.host, cache={})


def plan_layers(loads: Tensor, placement: Placement, policy: str | Policy = "exact", **options: Any) -> Plan:
    """:func:`plan` for all layers in one call: loads [L, E] or [L, R, E] -> Plan with fields [L, P] and [L]."""
    return plan(loads, placement, None, policy, **options)


def _plan(loads: Tensor, placed: PlacedLayers, policy: Policy) -> Plan:
    _check_loads(loads, placed, policy)
    slots = policy.fill(loads, placed)
    filled = slots is not placed.slot_to_expert
    tables = (
        ops.replica_tables(slots, placed.tables.num_ranks, placed.tables.num_experts)
        if filled
        else placed.tables
    )
    split = policy.split(loads, tables, placed)
    return Plan(
        slots, split.quota, split.peak, split.bound, tables, placed, policy, split.weights, split.telemetry
    )


def _check_loads(loads: Tensor, placed: PlacedLayers, policy: Policy) -> None:
    sums, sources = placed.shape_of_sums, placed.shape_per_source
    if loads.shape == sources:
        return
    if loads.shape != sums:
        raise ValueError(
            f"loads must be {list(sums)} or, per source rank, {list(sources)}, got {list(loads.shape)}"
        )
    if policy.needs == "per_source":
        raise ValueError(
            f"loads must be per source rank, {list(sources)}, for policy {policy.name}, got the sum {list(sums)}"
        )


def share(loads: Tensor, plan: Plan, rank: int | None = None, order: Order = "locality") -> Tensor:
    """How many copies source ranks send to each slot: every rank computes its own row, nothing is exchanged.

    Args:
        loads: [R, E] (or [L, R, E]) int32, those of the plan.
        plan: with a quota.
        rank: one source rank -> [P]; None: all -> [R, P].
        order: "locality" or "rank_major", see :func:`isoload.ops.share`. Policies that fix the share ignore it.
    """
    if plan.quota is None:
        raise ValueError(f"plan must have a quota to be shared, policy {plan.policy.name} samples")
    if loads.device != plan.bound.device:
        raise ValueError(f"loads must be on the plan's device {plan.bound.device}, got {loads.device}")
    if loads.shape != plan.placed.shape_per_source:
        raise ValueError(
            f"loads must be per source rank, {list(plan.placed.shape_per_source)}, got {list(loads.shape)}"
        )
    if rank is not None and not 0 <= rank < plan.tables.num_ranks:
        raise ValueError(f"rank must be in 0..{plan.tables.num_ranks - 1}, got {rank}")
    return plan.policy.share(loads, plan, rank, order)
