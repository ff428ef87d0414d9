"""The second stage: from gathered loads to a Plan, and from a Plan to each rank's share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isoload.ops import Counted, Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies import Demand, Policy, make_policy
from isoload.policies.base import shared_part
from isoload.policies.borrowing import keeping_local
from isoload.policies.plan import Plan, keep_home, per_expert


@dataclass(eq=False)
class Gathered:
    """One batch, counted, of every owned rank, and on its way to slots.

    loads        [R, E]; where nothing will be planned, nothing is gathered: the owned ranks' own counts
    more         [R, W] what was gathered with the loads
    plan         if there is one, once it is made
    send_counts  [P] copies of the routed experts that every owned rank sends to each slot: where the op that planned
                 has made them, too, or by the rank's own counts, in the place of a plan
    """

    counted: list[Counted]
    loads: Tensor
    planned: bool
    more: Tensor | None = None
    plan: Plan | None = None
    send_counts: list[Tensor] | None = None


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
    """Decides which replica computes how many copies, for one layer and batch.

    Args:
        loads: [E] or, where the policy or the route needs sources, [R, E]: int32 copies (see :func:`count`).
        placement: checked when it was made; or layers of one that a caller keeps on the loads' device.
        layer: position of the layer in the placement; None = all layers, as :func:`plan_layers`, or those kept.
        policy: a name in ``isoload.POLICIES``, or a Policy.
        filled: slots that :func:`fill` filled before, for these layers; None = the policy fills them from the loads.
        keep_local: copies whose expert has a slot on their own rank stay there, and the policy splits the rest above
            them. Needs loads per source. The bound is of all quotas all the same.
        step: the batch's number, for policies that sample: each has a random stream of its own. A [] int64 tensor on
            the loads' device is read when a kernel draws, and draws what the same int would.
        **options: the policy's own, e.g. ``tolerance=0.002``.

    Returns:
        Plan with fields [P] and []; ``peak == bound`` proves optimality.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    chosen, placed = make_policy(policy, options), _placed(loads, placement, layer)
    _check_loads(loads, placed, chosen, keep_local)
    chosen.check(placed.host)
    split = keeping_local(chosen) if keep_local else None
    return chosen.plan(loads, placed, filled=filled, split=split, step=step)


def plan_layers(loads: Tensor, placement: Placement, policy: str | Policy = "exact", **options: Any) -> Plan:
    """:func:`plan` for all layers in one call: loads [L, E] or [L, R, E] -> Plan with fields [L, P] and [L]."""
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
    """The slots that a policy fills, by itself: ahead of the batch from predicted loads, or from the loads.

    Args: as of :func:`plan`, which takes the result as ``filled``; weights can travel in between.
        last: the result for the batch before, which a policy with ``refill_above`` may keep.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    chosen, placed = make_policy(policy, options), _placed(loads, placement, layer)
    _check_loads(loads, placed, chosen)
    chosen.check(placed.host)
    if last is not None and (last.host is not placed.host or last.layer != placed.layer):
        raise ValueError(
            f"last must be of the placement and layer that are filled, {placed.layer}, got {last.layer}"
        )
    return chosen.fill(Demand.of(loads, placed)._replace(last=last), placed)


def _placed(loads: Tensor, placement: Placement | PlacedLayers, layer: int | None) -> PlacedLayers:
    """The layers that are planned, on the loads' device."""
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
    """How many copies source ranks send to each slot: every rank computes its own row, nothing is exchanged.

    Args:
        loads: [R, E] (or [L, R, E]) int32, those of the plan.
        plan: with a quota. Where only its shared experts are sampled, their slots are 0 here.
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
    """:func:`share` of the routed experts alone; the shared slots are 0."""
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
