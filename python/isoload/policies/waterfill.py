"""Policies that decide where shared experts are computed: ``shared_local``, ``waterfill``, ``waterfill_sampled``.

All three split the routed experts by another policy first (option ``routed``), so that what is compared is the
decision about the shared ones alone. ``joint`` decides both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import Candidates, Order, SharedRule
from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Policy, Split, sample_seed
from isoload.policies.even import EvenPolicy
from isoload.policies.exact import ExactPolicy
from isoload.policies.none import NonePolicy
from isoload.policies.static import StaticPolicy
from isoload.records import Plan, rank_cost
from isoload.replica_tables import ReplicaTables
from isoload.shared_experts import Rule, SharedPlan

ROUTED: dict[str, Policy] = {p.name: p for p in (NonePolicy(), StaticPolicy(), EvenPolicy(), ExactPolicy())}


@dataclass(frozen=True)
class SharedPolicy(Policy, ABC):
    """Base: the routed experts by policy `routed`, the shared ones by :meth:`pour`."""

    needs = "per_source"
    routed: str = "even"

    def __post_init__(self) -> None:
        if self.routed not in ROUTED:
            raise ValueError(f"routed must be one of {', '.join(ROUTED)}, got {self.routed!r}")

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        check_shared(placed, self.name)
        return self.pour(self.split_routed(demand, tables, placed), demand, tables, placed)

    def split_routed(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        """The split of the routed experts, as if there were no others."""
        return ROUTED[self.routed].split(Demand(demand.loads), tables, placed)

    @abstractmethod
    def pour(self, split: Split, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        """The whole decision, given the routed part."""

    def share(
        self,
        loads: Tensor,
        quota: Tensor,
        tables: ReplicaTables,
        placed: PlacedLayers,
        rank: int | None,
        order: Order,
    ) -> Tensor:
        return ROUTED[self.routed].share(loads, quota, tables, placed, rank, order)

    def copies(self, loads: Tensor, quota: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Tensor:
        return ROUTED[self.routed].copies(loads, quota, tables, placed)


def check_shared(placed: PlacedLayers, policy: str, most: int | None = None) -> None:
    if not placed.num_shared:
        raise ValueError(f"placement must have shared experts for policy {policy}, got num_shared=0")
    if most is not None and placed.num_shared > most:
        raise ValueError(f"num_shared must be at most {most} for policy {policy}, got {placed.num_shared}")


def poured_bound(demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Tensor:
    """A lower bound of the peak over every split of the routed experts and every place of the shared copies."""
    ticks = placed.topology.ticks_on(demand.loads.device)
    pour = total_shared(demand, placed)
    bound = ops.plan_exact(demand.loads, tables, budget=0, sweeps=0, ticks=ticks, pour=pour).bound
    return live_bound(bound, demand, placed)


def live_bound(bound: Tensor, demand: Demand, placed: PlacedLayers) -> Tensor:
    """The bound, raised to the level of all copies over the ranks that are alive, where some are not."""
    limits = placed.shared_limits
    if limits is None:
        return bound
    copies = demand.loads.sum((-2, -1), dtype=torch.int32) + total_shared(demand, placed)
    num_ranks = placed.topology.num_ranks
    # as if all copies were shared ones and came from rank 0
    everything = torch.nn.functional.pad(copies.unsqueeze(-1), (0, num_ranks - 1))
    nothing = torch.zeros_like(everything).unsqueeze(-1).expand(*everything.shape, num_ranks).contiguous()
    ticks = placed.topology.ticks_on(bound.device)
    return torch.maximum(bound, ops.plan_waterfill(nothing, everything, ticks=ticks, limits=limits).peak)


def total_shared(demand: Demand, placed: PlacedLayers) -> Tensor:
    """[...] int32 shared copies of all ranks."""
    assert demand.tokens is not None
    return demand.tokens.sum(-1, dtype=torch.int32) * placed.num_shared


@dataclass(frozen=True)
class SharedLocalPolicy(SharedPolicy):
    """Shared experts are computed on the rank that has the token (SGLang #20089): what waterfill is compared with.

    Options: routed, the policy that splits the routed experts: none, static, even or exact.
    """

    name = "shared_local"

    def pour(self, split: Split, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        assert split.quota is not None
        peak = rank_cost(split.quota, placed.topology, demand.at_home).amax(-1)
        bound = poured_bound(demand, tables, placed)
        return Split(split.quota, peak, torch.minimum(bound, peak), split.telemetry)


def pour_exactly(
    policy: SharedPolicy,
    split: Split,
    demand: Demand,
    tables: ReplicaTables,
    placed: PlacedLayers,
    candidates: Candidates,
) -> tuple[ops.WaterfillSplit, SharedPlan]:
    """The least peak over all places of the shared copies, given the routed split; and who sends what where."""
    assert split.quota is not None and demand.tokens is not None
    copies = policy.copies(demand.loads, split.quota, tables, placed)
    topology = placed.topology
    poured = ops.plan_waterfill(
        copies,
        demand.tokens,
        placed.num_shared,
        topology.ranks_per_node,
        candidates,
        ticks=topology.ticks_on(copies.device),
        limits=placed.shared_limits,
    )
    rule: Rule = "limit" if candidates == "visited" else "share"
    return poured, SharedPlan(rule, demand.tokens, poured.share, copies)


@dataclass(frozen=True)
class WaterfillPolicy(SharedPolicy):
    """Shared copies fill the ranks up to one level; home keeps what fits, ranks that the token visits come next.

    The integer form of the blog's Waterfill (papers/001): the peak is the least there is for this routed split, and
    no more copies leave home than must.

    Options: routed as in ``shared_local``; candidates: "all" ranks, those of the own "node", or only "visited" ones
    and the source, where what finds no visited rank stays home and the peak is counted from routed slots.
    """

    name = "waterfill"
    candidates: Candidates = "all"

    def pour(self, split: Split, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        poured, shared = pour_exactly(self, split, demand, tables, placed, self.candidates)
        bound = torch.minimum(poured_bound(demand, tables, placed), poured.peak)
        peak = poured.peak if shared.is_met else None
        return Split(split.quota, peak, bound, split.telemetry, None, shared)


@dataclass(frozen=True)
class WaterfillSampledPolicy(SharedPolicy):
    """Every token draws its shared expert's rank: the published Waterfill, for comparison.

    Options: rule: "static" and "dynamic" are SGLang's two forms, "blog" is papers/001's formula; routed as in
    ``shared_local``; seed and step (the batch's number) select the random stream of "blog".
    """

    name = "waterfill_sampled"
    rule: SharedRule = "static"
    seed: int = 0
    step: int = 0

    def pour(self, split: Split, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        check_shared(placed, self.name, most=1)
        if placed.shared_limits is not None:
            raise ValueError(
                "topology must have all ranks alive for policy waterfill_sampled, which draws any of them"
            )
        assert split.quota is not None and demand.tokens is not None
        copies = self.copies(demand.loads, split.quota, tables, placed)
        shared = SharedPlan("sample", demand.tokens, None, copies)
        return Split(split.quota, None, poured_bound(demand, tables, placed), split.telemetry, None, shared)

    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor:
        assert plan.shared is not None and plan.shared.copies is not None
        copies = plan.shared.copies
        load = copies.select(0, rank) if self.rule == "static" else copies.sum(0, dtype=torch.int32)
        size, seed = plan.placed.host.slots_per_rank, sample_seed(plan, rank)
        return ops.route_shared_sampled(slots, load, plan.shared.tokens, size, rank, self.rule, seed)
