"""The second stage: from gathered loads to a Plan, and from a Plan to each rank's share of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoload.ops import Counted, Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies import Demand, Policy, make_policy
from isoload.policies.base import shared_part, solve
from isoload.policies.borrowing import MILLION, keeping_local
from isoload.policies.plan import Plan, keep_home, per_expert


@dataclass(eq=False)
class Gathered:
    """One counted batch of every owned rank, between count and route."""

    counted: list[Counted]
    loads: Tensor  # [R, E]; for a batch that is not planned, the owned ranks' own counts
    planned: bool
    more: Tensor | None = None  # [R, W] integers that were gathered with the loads
    plan: Plan | None = None  # None before planning, and for batches that are not planned
    send_counts: list[Tensor] | None = None  # [P], if the planning op or own counts returned them


def plan(
    loads: Tensor,
    placement: Placement | PlacedLayers,
    layer: int | None = None,
    policy: str | Policy = "exact",
    *,
    filled: PlacedLayers | None = None,
    keep_local: bool = False,
    step: int | Tensor = 0,
    **options: Any,
) -> Plan:
    """Decide how many copies each replica computes, for one layer and batch.

    Args:
        loads: int32 copies (see :func:`count`), [E], or [R, E] where the policy or the route needs source ranks.
        placement: a Placement, or its PlacedLayers that a caller keeps on the loads' device.
        layer: position of the layer in the placement; None = all layers, as :func:`plan_layers`, or all PlacedLayers.
        policy: a name in ``isoload.POLICIES``, or a Policy.
        filled: slots from an earlier :func:`fill` for these layers; None = the policy fills them from the loads.
        keep_local: keep copies whose expert has a slot on their own rank there, and let the policy split the rest.
            Needs loads per source. The bound is still that of all quotas.
        step: number of the batch, which selects the random stream of policies that sample. A [] int64 tensor on the
            loads' device is read when the kernel draws, and gives the same samples as the int.
        **options: options of the policy, e.g. ``tolerance=0.002``.

    Returns:
        Plan with fields [P] and []; ``peak == bound`` proves optimality.
    """
    chosen, placed = make_policy(policy, options), _placed(loads, placement, layer)
    _check_loads(loads, placed, chosen, keep_local)
    chosen.check(placed.host)
    split = keeping_local(chosen) if keep_local else None
    return chosen.plan(loads, placed, filled=filled, split=split, step=step)


def plan_layers(loads: Tensor, placement: Placement, policy: str | Policy = "exact", **options: Any) -> Plan:
    """Run :func:`plan` for all layers in one call: loads [L, E] or [L, R, E] -> Plan with fields [L, P] and [L]."""
    return plan(loads, placement, None, policy, **options)


def fill(
    loads: Tensor,
    placement: Placement | PlacedLayers,
    layer: int | None = None,
    policy: str | Policy = "exact",
    *,
    last: PlacedLayers | None = None,
    **options: Any,
) -> PlacedLayers:
    """Return the slots that a policy fills with borrowed experts, from the loads or ahead of them from a prediction.

    :func:`plan` takes the result as ``filled``; weights can travel in between. Args are those of :func:`plan`, and:
        last: the result for the previous batch, which a policy with ``refill_above`` may keep.
    """
    chosen, placed = make_policy(policy, options), _placed(loads, placement, layer)
    _check_loads(loads, placed, chosen)
    chosen.check(placed.host)
    if last is not None and (last.host is not placed.host or last.layer != placed.layer):
        raise ValueError(
            f"last must be of the placement and layer that are filled, {placed.layer}, got {last.layer}"
        )
    return chosen.fill(Demand.of(loads, placed)._replace(last=last), placed)


class Refill(NamedTuple):
    """Spare slots of a batch where weights stay until the next fill."""

    filled: PlacedLayers  # the layers with these slots: those of the last fill, or new ones
    refilled: Tensor  # [] bool whether the slots are new
    before: Tensor  # [] int32 peak of the exact split over the last fill
    after: Tensor  # [] int32 peak of the exact split over these slots


def refill(policy: Policy, loads: Tensor, placed: PlacedLayers, last: PlacedLayers) -> Refill:
    """Fill a batch's spare slots if that lowers the peak and the last fill's imbalance is above refill_above. `loads`
    are [R, E], or [L, R, E] for all layers; `placed` has empty spare slots. Experts that are in a spare slot of their
    rank already stay there. No host wait."""
    demand, live = Demand.of(loads, placed), len(placed.topology.live_ranks)
    wanted = policy.fill(demand, placed).slot_to_expert
    slots = in_place(wanted, last.slot_to_expert, placed.topology.num_ranks, placed.spare_slots)
    filled = placed.fill(slots)
    before, after = solve(demand, last).peak, solve(demand, filled).peak
    limit = round((getattr(policy, "refill_above", None) or 1.0) * MILLION)
    copies = loads.flatten(placed.home_slot.dim() - 1).sum(-1)
    refills = (after < before) & (before.long() * live * MILLION > copies * limit)
    slots = torch.where(refills.unsqueeze(-1), slots, last.slot_to_expert)
    data = torch.where(refills.unsqueeze(-1), filled.tables.data, last.tables.data)
    filled = replace(filled, slot_to_expert=slots, tables=replace(filled.tables, data=data))
    return Refill(filled, refills, before, torch.where(refills, after, before))


def in_place(wanted: Tensor, present: Tensor, num_ranks: int, spare: int) -> Tensor:
    """Return [..., P] present slots with the experts of wanted [..., P] (-1: none) in their spare slots. An expert that
    is in a spare slot of its rank already stays there. Other wanted experts take empty slots first; slots that are not
    needed keep their expert."""
    slots = present.view(*present.shape[:-1], num_ranks, -1)
    want, now = wanted.view_as(slots)[..., -spare:], slots[..., -spare:]
    same = (now.unsqueeze(-1) == want.unsqueeze(-2)) & (now >= 0).unsqueeze(-1)  # [..., R, present, wanted]
    stays, arrives = same.any(-1), ~same.any(-2) & (want >= 0)
    arriving = want.gather(-1, (~arrives).int().argsort(dim=-1, stable=True))
    # Empty slots, then others, then those that stay.
    order = torch.where(stays, 2, torch.where(now >= 0, 1, 0))
    place = order.argsort(dim=-1, stable=True).argsort(dim=-1)
    now = torch.where(place < arrives.sum(-1, keepdim=True), arriving.gather(-1, place), now)
    return torch.cat([slots[..., :-spare], now], dim=-1).view_as(present)


def _placed(loads: Tensor, placement: Placement | PlacedLayers, layer: int | None) -> PlacedLayers:
    if isinstance(placement, PlacedLayers):
        if layer is not None:
            raise ValueError(f"layer must be None where the placement's layers are given, got {layer}")
        if loads.device != placement.home_slot.device:
            raise ValueError(
                f"loads must be on {placement.home_slot.device} as the layers, got {loads.device}"
            )
        return placement.resident
    return placement.layers(loads.device) if layer is None else placement.layer(layer, loads.device)


def _check_loads(loads: Tensor, placed: PlacedLayers, policy: Policy, keep_local: bool = False) -> None:
    if loads.shape == placed.shape_per_source:
        return
    sums, sources = placed.home_slot.shape, list(placed.shape_per_source)
    if loads.shape != sums:
        raise ValueError(
            f"loads must be {list(sums)} or, per source rank, {sources}, got {list(loads.shape)}"
        )
    if placed.num_shared or policy.needs == "per_source" or keep_local:
        what = f"policy {policy.name}" if policy.needs == "per_source" else "keep_local"
        what = "a placement with shared experts" if placed.num_shared else what
        raise ValueError(f"loads must be per source rank, {sources}, for {what}, got the sum {list(sums)}")


def share(loads: Tensor, plan: Plan, rank: int | None = None, order: Order = "locality") -> Tensor:
    """Return how many copies source ranks send to each slot. Every rank computes its own row without an exchange.

    Args:
        loads: [R, E] (or [L, R, E]) int32, those of the plan.
        plan: with a quota. If only its shared experts are sampled, their slots are 0 in the result.
        rank: one source rank -> [P]; None: all -> [R, P].
        order: "locality" or "rank_major", see :func:`isoload.ops.share`. Policies that fix the share ignore it.
    """
    send_counts, placed = share_routed(loads, plan, rank, order), plan.placed
    if plan.shared is not None and plan.shared.is_met and placed.shared_home is not None:
        sent = plan.shared.by_rank
        if sent is None:
            sent = keep_home(plan.shared.tokens * placed.num_shared, placed.shared_home)
        parts = per_expert(sent, placed.num_shared)  # [..., R, R, n]
        shared_part(send_counts, placed).add_(parts if rank is None else parts.select(-3, rank))
    return send_counts


def share_routed(loads: Tensor, plan: Plan, rank: int | None, order: Order = "locality") -> Tensor:
    """Return :func:`share` of the routed experts alone; the shared slots are 0."""
    if plan.quota is None:
        raise ValueError(f"plan must have a quota to be shared, policy {plan.policy.name} samples")
    if loads.device != plan.bound.device:
        raise ValueError(f"loads must be on the plan's device {plan.bound.device}, got {loads.device}")
    placed, sources = plan.placed, list(plan.placed.shape_per_source)
    if loads.shape != placed.shape_per_source:
        raise ValueError(f"loads must be per source rank, {sources}, got {list(loads.shape)}")
    if rank is not None and not 0 <= rank < plan.tables.num_ranks:
        raise ValueError(f"rank must be in 0..{plan.tables.num_ranks - 1}, got {rank}")
    routed = loads.narrow(-1, 0, plan.tables.num_experts) if placed.num_shared else loads
    return plan.policy.share(routed, plan, rank, order)


def share_of_node(loads: Tensor, quota: Tensor, slot_to_expert: Tensor, node: slice) -> Tensor:
    """Return [L, n, P] copies that the n ranks of a node send to each slot, as in :func:`isoload.ops.share`. The op
    returns the rows of all ranks, for 40 nodes 40 times the work. `loads` are [L, n, E] of the node's ranks, quota [L,
    P] the copies that each slot takes of them, node the slots of the node's ranks."""
    left, capacity, experts = loads.clone(), quota.clone(), slot_to_expert.long().clamp(min=0)
    inside = experts[:, node]
    own_experts = inside.view(*loads.shape[:2], -1)  # [L, n, S]
    local = torch.minimum(left.gather(2, own_experts), capacity[:, node].view_as(own_experts))
    left.scatter_add_(2, own_experts, -local)
    capacity[:, node] -= local.flatten(1)
    near = _dealt(left, capacity[:, node], inside)
    left.scatter_add_(2, inside.unsqueeze(1).expand(near.shape), -near)
    capacity[:, node] -= near.sum(1, dtype=torch.int32)
    sent = _dealt(left, capacity, experts)
    sent[:, :, node] += near
    for rank, of_rank in enumerate(local.unbind(1)):
        start = node.start + rank * local.shape[2]
        sent[:, rank, start : start + local.shape[2]] += of_rank
    return sent


def _dealt(left: Tensor, capacity: Tensor, experts: Tensor) -> Tensor:
    """Return [L, n, P] copies: sources fill an expert's slots, both in ascending order, until either is used up. left:
    [L, n, E] copies that each source has; capacity: [L, P] that each slot takes; experts: [L, P]."""
    by_expert, order = experts.sort(dim=1, stable=True)
    ends = capacity.gather(1, order).cumsum(1)  # on one line for all experts
    starts = ends - capacity.gather(1, order)
    first = torch.searchsorted(by_expert, by_expert)  # of the expert's slots
    begin = starts.gather(1, first)
    slots = torch.empty_like(starts).scatter_(1, order, starts - begin).int().unsqueeze(1)
    slot_ends = slots + capacity.unsqueeze(1)
    source_ends = left.cumsum(1, dtype=torch.int32)
    at = experts.unsqueeze(1).expand(-1, left.shape[1], -1)
    high = torch.minimum(source_ends.gather(2, at), slot_ends)
    return (high - torch.maximum((source_ends - left).gather(2, at), slots)).clamp_(min=0)
