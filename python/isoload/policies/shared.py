"""Policies that place shared experts: ``shared_local``, ``waterfill`` and ``joint``.

Any policy splits the routed experts (option ``routed``). The policies differ only in :meth:`SharedPolicy.add_shared`,
so that comparing them compares the decision about shared experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import Objective, Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.base import EVEN, Demand, Policy, exact_plan, make_policy, solve
from isoload.policies.exact import EvenPolicy, ExactPolicy
from isoload.policies.plan import Plan, SharedPlan, rank_cost, shared_copies, widened


@dataclass(frozen=True)
class SharedPolicy(Policy, ABC):
    """Base: policy `routed`, any with a quota, splits the routed experts; :meth:`add_shared` places the shared ones."""

    needs = "per_source"
    routed: str | Policy = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = self.routed_policy
        if isinstance(policy, SharedPolicy):
            raise ValueError(f"routed must be a policy of routed experts, got {policy.name!r}")
        if policy.samples:
            raise ValueError(f"routed must be a policy with a quota, {policy.name!r} samples")

    @property
    def routed_policy(self) -> Policy:
        return make_policy(self.routed)

    @property
    def borrows(self) -> bool:  # type: ignore[override]
        return self.routed_policy.borrows

    def check(self, placement: Placement) -> None:
        if not placement.num_shared:
            raise ValueError(f"placement must have shared experts for policy {self.name}, got num_shared=0")
        self.routed_policy.check(placement)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        return self.routed_policy.fill(demand.routed, placed)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        how = self.joined() if demand.rank is not None and placed.shared_limits is None else None
        if how is not None:
            return joint_plan(self, demand, placed, how)
        return self.add_shared(self.split_routed(demand, placed), demand)

    def split_routed(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return self.routed_policy.split(demand.routed, placed)

    def joined(self) -> dict[str, Any] | None:
        """Options of :func:`isoload.ops.plan_joint` that make the same plan in one op; None if there are none."""
        return None

    @abstractmethod
    def add_shared(self, plan: Plan, demand: Demand) -> Plan:
        """Return the whole plan, given the plan of the routed experts."""

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        return self.routed_policy.share(loads, plan, rank, order)


def rank_copies(loads: Tensor, plan: Plan) -> Tensor:
    """Return [..., R, R] int32 routed copies from source to rank: the share, summed over each rank's slots."""
    assert plan.quota is not None
    if type(plan.policy).share is Policy.share:
        return ops.share_by_rank(loads, plan.quota, plan.tables, plan.topology.ranks_per_node)
    rows = plan.policy.share(loads, plan, None, "locality")
    return rows.view(*rows.shape[:-1], plan.tables.num_ranks, -1).sum(-1, dtype=torch.int32)


def bound_with_shared(demand: Demand, placed: PlacedLayers) -> Tensor:
    """Return a lower bound of the peak over every split of the routed experts and every place of the shared copies."""
    bound = solve(demand.routed, placed, pour=total_shared(demand, placed), **EVEN).bound
    return live_bound(bound, demand, placed)


def live_bound(bound: Tensor, demand: Demand, placed: PlacedLayers) -> Tensor:
    """Return the bound, raised to the mean of all copies over the live ranks if some ranks are not alive."""
    limits = placed.shared_limits
    if limits is None:
        return bound
    copies = demand.loads.sum((-2, -1), dtype=torch.int32) + total_shared(demand, placed)
    num_ranks = placed.topology.num_ranks
    # All copies count as shared ones from rank 0.
    everything = torch.nn.functional.pad(copies.unsqueeze(-1), (0, num_ranks - 1))
    nothing = torch.zeros_like(everything).unsqueeze(-1).expand(*everything.shape, num_ranks).contiguous()
    level = ops.plan_waterfill(nothing, everything, ticks=placed.ticks, limits=limits).peak
    return torch.maximum(bound, level)


def total_shared(demand: Demand, placed: PlacedLayers) -> Tensor:
    assert demand.tokens is not None
    return shared_copies(widened(demand.tokens).sum(-1), placed.num_shared)


def joint_plan(policy: SharedPolicy, demand: Demand, placed: PlacedLayers, how: dict[str, Any]) -> Plan:
    """Return the whole plan and the send_counts of the demand's rank, from one kernel. `how`: the policy's joined()."""
    assert demand.gathered is not None and demand.tokens is not None and demand.rank is not None
    split = ops.plan_joint(
        demand.gathered,
        placed.tables,
        demand.rank,
        placed.num_shared,
        placed.first_shared,
        ticks=placed.ticks,
        ranks_per_node=placed.topology.ranks_per_node,
        **how,
    )
    shared = SharedPlan("by_rank", demand.tokens, split.share, in_quota=True)
    figures = split.quota, split.peak, split.bound, split.telemetry
    return Plan(placed, policy, *figures, shared=shared, send_counts=split.send_counts)


def add_exactly(plan: Plan, demand: Demand) -> tuple[ops.WaterfillSplit, SharedPlan]:
    """Return the least peak over all places of the shared copies, given the routed split, and who sends what where."""
    assert demand.tokens is not None
    placed = plan.placed
    filled = ops.plan_waterfill(
        rank_copies(demand.loads, plan),
        demand.tokens,
        placed.num_shared,
        placed.topology.ranks_per_node,
        ticks=placed.ticks,
        limits=placed.shared_limits,
    )
    return filled, SharedPlan("by_rank", demand.tokens, filled.share)


@dataclass(frozen=True)
class SharedLocalPolicy(SharedPolicy):
    """Computes shared experts on the rank that has the token (SGLang #20089): the baseline of waterfill."""

    name = "shared_local"

    def add_shared(self, plan: Plan, demand: Demand) -> Plan:
        assert plan.quota is not None
        peak = rank_cost(plan.quota, plan.topology, demand.local_shared).amax(-1)
        bound = torch.minimum(bound_with_shared(demand, plan.placed), peak)
        return replace(plan, policy=self, peak=peak, bound=bound)


@dataclass(frozen=True)
class WaterfillPolicy(SharedPolicy):
    """Shared copies fill the ranks up to one level; the token's own rank keeps what fits, then ranks that it visits.

    The integer form of the blog's Waterfill (papers/001). The peak is the least possible for this routed split, and as
    few copies as possible leave their token's rank.
    """

    name = "waterfill"
    removed: ClassVar[Mapping[str, str]] = {"candidates": "shared copies may go to all ranks"}

    def joined(self) -> dict[str, Any] | None:
        plain = type(self) is WaterfillPolicy and type(self.routed_policy) is EvenPolicy
        return EVEN if plain else None

    def split_routed(self, demand: Demand, placed: PlacedLayers) -> Plan:
        """Return the routed split. Copies spread evenly need no second split for the bound with shared copies."""
        if self.joined() is None:
            return super().split_routed(demand, placed)
        return exact_plan(
            self.routed_policy, demand.routed, placed, pour=total_shared(demand, placed), **EVEN
        )

    def add_shared(self, plan: Plan, demand: Demand) -> Plan:
        filled, shared = add_exactly(plan, demand)
        if self.joined() is None:
            bound = bound_with_shared(demand, plan.placed)
        else:
            bound = live_bound(plan.bound, demand, plan.placed)
        bound = torch.minimum(bound, filled.peak)
        return replace(plan, policy=self, peak=filled.peak, bound=bound, shared=shared)


@dataclass(frozen=True)
class JointPolicy(SharedPolicy):
    """The least peak over all splits of replicated experts and all places of shared copies, with its certificate.

    Shared copies can go anywhere, so they matter for the optimum only if all ranks are at the peak. An exact split that
    stops at the common level, followed by an exact fill, is therefore optimal, and keeps more routed copies near their
    source. A budget that ends the split early leaves ``peak > bound``.
    """

    name = "joint"
    removed: ClassVar[Mapping[str, str]] = ExactPolicy.removed
    routed: str = "exact"
    tolerance: float = 0.0
    budget: int | None = None
    objective: Objective = "spread"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._exact()
        if self.routed != "exact":
            raise ValueError(f"routed must be exact for policy joint, got {self.routed!r}")

    def _exact(self) -> ExactPolicy:
        return ExactPolicy(self.tolerance, self.budget, self.objective)

    def joined(self) -> dict[str, Any] | None:
        return self._exact().options if type(self) is JointPolicy else None

    def split_routed(self, demand: Demand, placed: PlacedLayers) -> Plan:
        exact, pour = self._exact(), total_shared(demand, placed)
        return exact_plan(exact, demand.routed, placed, pour=pour, **exact.options)

    def add_shared(self, plan: Plan, demand: Demand) -> Plan:
        filled, shared = add_exactly(plan, demand)
        bound = torch.minimum(live_bound(plan.bound, demand, plan.placed), filled.peak)
        return replace(plan, policy=self, peak=filled.peak, bound=bound, shared=shared)
