"""The protocol of an online policy: up to three functions, each with a default.

A policy is a frozen dataclass whose fields are its options. It never waits for a device and never talks to
another rank: from the same loads every rank computes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import Order
from isoload.placement import PlacedLayers
from isoload.records import Plan, rank_cost
from isoload.replica_tables import ReplicaTables


class Split(NamedTuple):
    """A policy's decision (leading L as the tables): see Plan for the fields."""

    quota: Tensor | None
    peak: Tensor | None
    bound: Tensor
    telemetry: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Policy:
    """Base of all policies; by itself it fills nothing and splits exactly."""

    name: ClassVar[str]

    @property
    def needs(self) -> Literal["sum", "per_source"]:
        """Which loads the policy reads: [E] sums or [R, E] per source rank."""
        return "sum"

    def fill(self, loads: Tensor, placed: PlacedLayers) -> Tensor:
        """slot_to_expert [..., P] for this batch: the placement, with spare slots filled if the policy borrows."""
        return placed.slot_to_expert

    def split(self, loads: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        """How many copies every slot takes, from loads [..., E] or [..., R, E]."""
        exact = ops.plan_exact(loads, tables, ticks=placed.topology.ticks_on(loads.device))
        return Split(*exact)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        """Source ranks' parts of the quota: [..., P] for one rank, [..., R, P] for all, from loads [..., R, E]."""
        assert plan.quota is not None
        return ops.share(loads, plan.quota, plan.tables, plan.topology.ranks_per_node, rank, order)


def sum_sources(loads: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., E] copies per expert, from loads with or without a source dimension."""
    return loads if loads.dim() == placed.home_slot.dim() else loads.sum(-2, dtype=torch.int32)


def even_split(loads: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> ops.ExactSplit:
    """The exact solver's start: copies spread evenly over replicas, with the lower bound that costs nothing."""
    return ops.plan_exact(loads, tables, budget=0, sweeps=0, ticks=placed.topology.ticks_on(loads.device))


def chosen_split(quota: Tensor, loads: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Split:
    """The Split of a quota that was not made by the solver."""
    peak = rank_cost(quota, placed.topology).amax(-1)
    return Split(quota, peak, torch.minimum(even_split(loads, tables, placed).bound, peak))
