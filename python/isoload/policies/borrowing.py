"""What the policies that borrow weights have in common: one fills the spare slots, this base splits the copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import Order
from isoload.placement.placed_layers import HostPlacement, PlacedLayers
from isoload.policies.base import Demand, Needs, Policy, chosen_plan, make_policy, solve
from isoload.policies.exact import ExactPolicy
from isoload.policies.plan import Plan

EXACT = ExactPolicy()
MILLION = 1_000_000
Made = TypeVar("Made")


class BorrowPolicy(Policy, ABC):
    """Base: :meth:`fill` fills the spare slots; the copies go as it says, or as another policy splits them.

    Options, for who has them: split_by, "fill" or any policy, e.g. "exact", "lp", "joint" or a Policy; in plans of a
    fill without a quota, or that was made from other loads (isoload.balancing.planning.fill), "fill" means "exact".
    slots: the most spare slots of a rank that are filled, the last ones; None = all.
    """

    borrows = True
    split_by: str | Policy = "fill"
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splitter.borrows:
            raise ValueError(f"split_by must be a policy that does not borrow, got {self.split_by!r}")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")

    @property
    def splitter(self) -> Policy:
        """What splits the copies where the fill does not."""
        return EXACT if self.split_by == "fill" else make_policy(self.split_by)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.splitter.needs

    @property
    def samples(self) -> bool:  # type: ignore[override]
        return self.splitter.samples

    def check(self, placement: HostPlacement) -> None:
        spare = placement.spare_slots
        if spare < 1:
            raise ValueError(f"spare_slots must be at least 1 for policy {self.name}, got {spare}")
        if placement.topology.speeds is not None:
            raise ValueError(f"speeds must be None for policy {self.name}, which counts copies")
        if self.slots is not None and self.slots > spare:
            raise ValueError(
                f"slots must be at most spare_slots, {spare}, for policy {self.name}, got {self.slots}"
            )
        self.splitter.check(placement)

    @abstractmethod
    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """The placed layers with filled spare slots, their quota if it has one, and telemetry."""

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        by_fill, of = self.split_by == "fill", type(self)
        if by_fill and placed.quota is not None:
            return chosen_plan(self, placed.quota, demand, placed, placed.telemetry)
        if of.split is not BorrowPolicy.split or of.share is not BorrowPolicy.share:
            demand = demand._replace(rank=None)  # which may split or share its own way
        made = self.splitter.split(demand, placed)
        own = by_fill or self.split_by == "exact"
        return replace(made, policy=self if own else made.policy, telemetry=placed.telemetry)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        return self.splitter.share(loads, plan, rank, order)


def fill_spare(
    op: Callable[..., Made],
    demand: Demand,
    placed: PlacedLayers,
    slots: int | None,
    begun: Tensor | None = None,
    **rules: Any,
) -> Made:
    """What an op that fills spare slots makes of a placement and its topology.

    slots: the last ones of every rank that may be filled; None = all. begun: [..., P] with some filled already.
    """
    return op(
        demand.loads,
        placed.slot_to_expert if begun is None else begun,
        routed_homes(placed),
        placed.topology.num_ranks,
        placed.spare_slots if slots is None else slots,
        demand.at_home,
        alive=placed.alive,
        ranks_per_node=placed.topology.ranks_per_node,
        **rules,
    )


class FillPolicy(BorrowPolicy):
    """Base of policies that fill by levels (:func:`isoload.ops.plan_fill`) and split exactly over the filled slots.

    Options, for who has them: split_by, a policy that splits over the filled slots in place of "exact".
    refill_above: where the caller passes the last fill (isoload.balancing.planning.fill), it is kept while the exact
    split over it has at most this imbalance; None = every batch is filled anew. slots: as of :class:`BorrowPolicy`.
    """

    split_by: str | Policy = "exact"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        if self.split_by == "fill":
            use = "the copies go as split_by=exact splits them over the filled slots"
            raise ValueError(f"option split_by=fill of policy {self.name} was removed: {use}")
        super().__post_init__()
        if self.refill_above is not None and not 1 <= self.refill_above <= 1000:
            raise ValueError(f"refill_above must be in 1..1000, got {self.refill_above}")

    def fill_levels(self, demand: Demand, placed: PlacedLayers, **rules: Any) -> ops.SlotFill:
        """:func:`isoload.ops.plan_fill` by a policy's rules, from the exact split over replicas if there are any."""
        start = solve(demand, placed).quota if placed.replicated else None
        return fill_spare(ops.plan_fill, demand, placed, self.slots, start=start, **rules)

    def filled(self, demand: Demand, placed: PlacedLayers, made: ops.SlotFill) -> PlacedLayers:
        """The layers with these slots, or with those of the last fill where the exact split over it is level enough."""
        last, slots, telemetry = demand.last, made.slot_to_expert, made.telemetry
        if last is None or self.refill_above is None:
            return placed.fill(slots, telemetry=telemetry)
        assert last.telemetry is not None
        copies = demand.loads.flatten(placed.home_slot.dim() - 1).sum(-1)
        if demand.at_home is not None:
            copies = copies + demand.at_home.sum(-1)
        live, limit = len(placed.topology.live_ranks), round(self.refill_above * MILLION)
        keep = (solve(demand, last).peak * live * MILLION <= copies * limit).unsqueeze(-1)
        slots = torch.where(keep, last.slot_to_expert, slots)
        return placed.fill(slots, telemetry=torch.where(keep, last.telemetry, telemetry))


def routed_homes(placed: PlacedLayers) -> Tensor:
    """[..., E] home slots of the routed experts."""
    return placed.home_slot.narrow(-1, 0, placed.host.num_routed)
