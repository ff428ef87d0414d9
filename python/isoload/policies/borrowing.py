"""What the policies that borrow weights have in common: one fills the spare slots, this base splits the copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from isoload import ops
from isoload.ops import Order
from isoload.policies.base import Demand, Needs, Policy, chosen_plan, make_policy, solve
from isoload.policies.exact import ExactPolicy
from isoload.records.placed_layers import HostPlacement, PlacedLayers
from isoload.records.plan import Plan

EXACT = ExactPolicy()
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
            raise ValueError(f"split_by must be fill or a policy that does not borrow, got {self.split_by!r}")
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
        return replace(made, policy=self if by_fill else made.policy, telemetry=placed.telemetry)

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


def plan_spill(demand: Demand, placed: PlacedLayers, slots: int | None = None, **rules: Any) -> ops.Spill:
    """:func:`isoload.ops.plan_spill` by a policy's rules.

    Where experts have replicas it starts from the exact split over them, so that only what they leave is lent, unless
    lending from all home slots is better.
    """
    start = solve(demand, placed).quota if placed.replicated else None
    return fill_spare(ops.plan_spill, demand, placed, slots, start=start, **rules)


def routed_homes(placed: PlacedLayers) -> Tensor:
    """[..., E] home slots of the routed experts."""
    return placed.home_slot.narrow(-1, 0, placed.host.num_routed)
