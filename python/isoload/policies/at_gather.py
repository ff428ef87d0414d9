"""A plan that the kernel of the gather makes, where ranks write each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.policies.base import Policy
from isoload.records import Plan


@dataclass(eq=False)
class PlanAtGather:
    """In the place of :func:`isoload.ops.gather_rows`, once: ``plan`` is then that of the loads which it returned.

    ``row`` is this rank's share of it.

    policy   whose split is exact, without a fill
    placed   the layer
    options  of :func:`isoload.ops.plan_exact_share_gathered`
    """

    policy: Policy
    placed: PlacedLayers
    options: dict[str, Any]
    plan: Plan | None = field(default=None, init=False)
    row: Tensor | None = field(default=None, init=False)

    def __call__(
        self, row: Tensor, boards: Tensor, board: Tensor, rank: int, *, beside: Sequence[int], timeout: float
    ) -> tuple[Tensor, Tensor]:
        filled, topology = self.placed.filled, self.placed.topology
        loads, told, split, self.row = ops.plan_exact_share_gathered(
            row,
            boards,
            board,
            rank,
            filled.tables,
            beside=beside,
            timeout=timeout,
            ticks=topology.ticks_on(row.device),
            ranks_per_node=topology.ranks_per_node,
            **self.options,
        )
        self.plan = Plan(filled, self.policy, *split)
        return loads, told


def plan_at_gather(policy: Policy, placed: PlacedLayers) -> PlanAtGather | None:
    """Where nothing but the loads and the slots as they are goes into the plan."""
    options = policy.at_gather()
    if options is None or placed.num_shared:
        return None
    return PlanAtGather(policy, placed, options)


def is_plan_of(plan: Plan | None, policy: Policy, placed: PlacedLayers) -> bool:
    """Whether a plan made at the gather is that of this policy and placement: both may have been replaced since."""
    return plan is not None and plan.policy is policy and plan.filled is placed.filled
