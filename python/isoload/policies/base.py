"""The protocol of an online policy: up to four functions, each with a default.

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
from isoload.shared_experts import SharedPlan

GOLDEN = 0x9E3779B97F4A7C15  # spreads layer, step and rank over the 64-bit seeds of sampled routes


class Split(NamedTuple):
    """A policy's decision (leading L as the tables): see Plan for the fields. Without shared, they stay home."""

    quota: Tensor | None
    peak: Tensor | None
    bound: Tensor
    telemetry: Tensor | None = None
    weights: Tensor | None = None
    shared: SharedPlan | None = None


class Decision(NamedTuple):
    """All that a policy decides: slot_to_expert [..., P] with spare slots filled, its tables, and the split."""

    slot_to_expert: Tensor
    tables: ReplicaTables
    split: Split


class Demand(NamedTuple):
    """What a batch asks of the ranks (leading L as the placement's layers).

    loads   [E] or [R, E] int32  copies of the routed experts
    tokens  [R] int32            tokens of each source rank that need the shared experts; None without any
    at_home [R] int32            shared copies per rank if all stay home; None without shared experts
    """

    loads: Tensor
    tokens: Tensor | None = None
    at_home: Tensor | None = None


@dataclass(frozen=True)
class Policy:
    """Base of all policies; by itself it fills nothing, splits exactly and leaves shared experts at home."""

    name: ClassVar[str]
    borrows: ClassVar[bool] = False  # whether it fills spare slots, whose weights somebody must then bring

    @property
    def needs(self) -> Literal["sum", "per_source"]:
        """Which loads the policy reads: [E] sums or [R, E] per source rank."""
        return "sum"

    def fill(self, demand: Demand, placed: PlacedLayers) -> Tensor:
        """slot_to_expert [..., P] for this batch: the placement, with spare slots filled if the policy borrows."""
        return placed.slot_to_expert

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        """How many copies every slot takes."""
        ticks = placed.topology.ticks_on(demand.loads.device)
        return Split(*ops.plan_exact(demand.loads, tables, demand.at_home, ticks=ticks))

    def decide(self, demand: Demand, placed: PlacedLayers) -> Decision:
        """The fill, then the split; a policy that finds both at once overrides this."""
        slots = self.fill(demand, placed)
        tables = placed.tables if slots is placed.slot_to_expert else placed.routed_tables(slots)
        return Decision(slots, tables, self.split(demand, tables, placed))

    def share(
        self,
        loads: Tensor,
        quota: Tensor,
        tables: ReplicaTables,
        placed: PlacedLayers,
        rank: int | None,
        order: Order,
    ) -> Tensor:
        """Source ranks' parts of the routed quota: [..., P] for one rank, [..., R, P] for all, from [..., R, E]."""
        return ops.share(loads, quota, tables, placed.topology.ranks_per_node, rank, order)

    def copies(self, loads: Tensor, quota: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Tensor:
        """[..., R, R] int32 routed copies from source to rank: the share, summed over each rank's slots."""
        return ops.share_by_rank(loads, quota, tables, placed.topology.ranks_per_node)

    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor:
        """[T, n] int32 the rank of every token's shared experts, given its routed slots [T, K]; -1 = no token."""
        assert plan.shared is not None
        placed, share = plan.placed, plan.shared.share
        if share is None:
            home = torch.where((slots >= 0).any(1, keepdim=True), placed.home_rank(rank), -1)
            return home.to(torch.int32).expand(-1, placed.num_shared)
        strict = plan.shared.rule == "limit"
        size, row = placed.host.slots_per_rank, share.select(0, rank)
        return ops.route_shared(slots, row, size, rank, placed.num_shared, strict=strict)


def sum_sources(loads: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., E] copies per expert, from loads with or without a source dimension."""
    return loads if loads.dim() == placed.home_slot.dim() else loads.sum(-2, dtype=torch.int32)


def even_split(demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> ops.ExactSplit:
    """The exact solver's start: copies spread evenly over replicas, with the lower bound that costs nothing."""
    ticks = placed.topology.ticks_on(demand.loads.device)
    return ops.plan_exact(demand.loads, tables, demand.at_home, budget=0, sweeps=0, ticks=ticks)


def chosen_split(quota: Tensor, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
    """The Split of a quota that was not made by the solver."""
    peak = rank_cost(quota, placed.topology, demand.at_home).amax(-1)
    return Split(quota, peak, torch.minimum(even_split(demand, tables, placed).bound, peak))


def sample_seed(plan: Plan, rank: int) -> int:
    """The random stream of one rank, layer and step of a sampled policy."""
    seed = getattr(plan.policy, "seed", 0)
    for part in (plan.layer or 0, getattr(plan.policy, "step", 0), rank):
        seed = ((seed + part + 1) * GOLDEN) % 2**64
        seed ^= seed >> 31
    return seed
