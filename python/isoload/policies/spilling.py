"""What the policies that borrow weights have in common: one op fills the spare slots and splits the copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import Order
from isoload.placed_layers import PlacedLayers
from isoload.placement import Placement
from isoload.policies.base import Demand, Needs, Policy, chosen_plan
from isoload.policies.exact import ExactPolicy
from isoload.policies.registry import make_policy
from isoload.records import Plan

EXACT = ExactPolicy()


@dataclass(frozen=True)
class SpillPolicy(Policy, ABC):
    """Base: :meth:`spill` fills the spare slots; the copies go as it says, or as another policy splits them.

    Options: split_by, "fill" or any policy, e.g. "exact", "lp", "joint" or a Policy; in plans of a fill that was made
    from other loads (:func:`isoload.planning.fill`) "fill" means "exact".
    """

    borrows = True
    split_by: str | Policy = "fill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_by != "fill" and make_policy(self.split_by).borrows:
            raise ValueError(f"split_by must be fill or a policy that does not borrow, got {self.split_by!r}")

    @property
    def needs(self) -> Needs:
        return self._splitter.needs

    @property
    def samples(self) -> bool:
        return self._splitter.samples

    @property
    def may_keep_local(self) -> bool:
        return self._splitter.may_keep_local

    @property
    def _splitter(self) -> Policy:
        return EXACT if self.split_by == "fill" else make_policy(self.split_by)

    @abstractmethod
    def spill(self, demand: Demand, placed: PlacedLayers) -> ops.Spill:
        """Filled slots, quota, level and telemetry, see :class:`isoload.ops.Spill`."""

    def check(self, placement: Placement) -> None:
        check_borrows(self, placement)
        self._splitter.check(placement)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        spill = self.spill(demand, placed)
        return placed.fill(spill.slot_to_expert, spill.quota, spill.telemetry)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        if self.split_by == "fill" and placed.quota is not None:
            return chosen_plan(self, placed.quota, demand, placed, placed.telemetry)
        return replace(self._splitter.split(demand, placed), telemetry=placed.telemetry)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        return self._splitter.share(loads, plan, rank, order)

    def copies(self, loads: Tensor, plan: Plan) -> Tensor:
        return self._splitter.copies(loads, plan)


def check_borrows(policy: Policy, placement: Placement) -> None:
    """Raises where a policy has no slot to fill, or would have to count in ticks."""
    if placement.spare_slots < 1:
        raise ValueError(
            f"spare_slots must be at least 1 for policy {policy.name}, got {placement.spare_slots}"
        )
    if placement.topology.speeds is not None:
        raise ValueError(f"speeds must be None for policy {policy.name}, which counts copies")


def plan_spill(
    demand: Demand, placed: PlacedLayers, spare_slots: int | None = None, **rules: Any
) -> ops.Spill:
    """:func:`isoload.ops.plan_spill` of a placement and its topology, by a policy's rules.

    spare_slots: the last ones of every rank that may be filled; None = all.

    Where experts have replicas it starts from the exact split over them, so that only what they leave is lent, unless
    lending from all home slots is better.
    """
    start = ops.plan_exact(demand.loads, placed.tables, demand.at_home).quota if placed.replicated else None
    return ops.plan_spill(
        demand.loads,
        placed.slot_to_expert,
        routed_homes(placed),
        placed.topology.num_ranks,
        placed.spare_slots if spare_slots is None else spare_slots,
        demand.at_home,
        start=start,
        alive=alive(placed),
        ranks_per_node=placed.topology.ranks_per_node,
        **rules,
    )


def alive(placed: PlacedLayers) -> Tensor | None:
    """[R] bool ranks that may borrow; None = all."""
    return None if placed.topology.alive is None else placed.memo("alive", _alive)


def _alive(placed: PlacedLayers) -> Tensor:
    return torch.tensor(placed.topology.alive, device=placed.home_slot.device)


def routed_homes(placed: PlacedLayers) -> Tensor:
    """[..., E] home slots of the routed experts."""
    return placed.home_slot.narrow(-1, 0, placed.host.num_routed)
