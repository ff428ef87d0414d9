"""Policies ``none``, ``even``, ``static``, ``exact`` (the optimum of LPLB's program), ``exact_active`` and ``lp``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.checks import check_range
from isoload.ops import Objective, Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import IntArray, Placement
from isoload.policies.base import (
    EVEN,
    Demand,
    Needs,
    Policy,
    check_seed,
    chosen_plan,
    exact_plan,
    sum_sources,
)
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class ExactPolicy(Policy):
    """The least possible peak over all integer quotas: ``peak == bound`` with tolerance 0 and no budget."""

    name = "exact"
    removed: ClassVar[Mapping[str, str]] = {"objective=packed": "use policy exact_active"}
    tolerance: float = 0.0
    budget: int | None = None
    objective: Objective = "spread"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000 (relative), got {self.tolerance}")
        if self.budget is not None and not 0 <= self.budget < 2**31:
            raise ValueError(f"budget must be in 0..2^31-1, got {self.budget}")

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return "per_source" if self.objective == "local" else "sum"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        rank = demand.rank if type(self) is ExactPolicy else None  # subclasses split or share differently
        per_node = placed.topology.ranks_per_node
        how: dict[str, Any] = {"ticks": placed.ticks, "ranks_per_node": per_node, "objective": self.objective}
        split = ops.plan_exact(
            demand.loads, placed.tables, demand.local_shared, self.tolerance, self.budget, rank=rank, **how
        )
        send_counts = None if rank is None else split.send_counts
        return Plan(
            placed, self, split.quota, split.peak, split.bound, split.telemetry, send_counts=send_counts
        )

    def balance_same(self, topk_ids: Tensor, placed: PlacedLayers) -> tuple[Tensor, Tensor, Plan]:
        """Return slots [T, K] of rows that all ranks hold, their loads [R, E], and the plan; without shared experts."""
        per_node = placed.topology.ranks_per_node
        how: dict[str, Any] = {"ranks_per_node": per_node, "ticks": placed.ticks, **self.options}
        slots, loads, split = ops.balance_same(topk_ids, placed.tables, **how)
        return slots, loads, Plan(placed, self, split.quota, split.peak, split.bound, split.telemetry)

    @property
    def options(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance, "budget": self.budget, "objective": self.objective}


@dataclass(frozen=True)
class NonePolicy(Policy):
    """Sends all copies of an expert to its home slot."""

    name = "none"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        copies = sum_sources(demand.loads, placed)
        home = placed.home_slot.narrow(-1, 0, placed.tables.num_experts).long()
        quota = torch.zeros_like(placed.slot_to_expert).scatter_(-1, home, copies)
        return chosen_plan(self, quota, demand, placed)


@dataclass(frozen=True)
class EvenPolicy(Policy):
    """Gives every replica of an expert the same number of copies, up to a remainder that rotates."""

    name = "even"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return exact_plan(self, demand, placed, **EVEN)


@dataclass(frozen=True)
class StaticPolicy(Policy):
    """A replica on the own rank, else one on the own node, else one by a fair seeded draw, fixed for a placement."""

    name = "static"
    needs = "per_source"
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed("seed", self.seed)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        send_counts = self._send_counts(demand.loads, placed)
        return chosen_plan(self, send_counts.sum(-2, dtype=torch.int32), demand, placed)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        return self._send_counts(loads, plan.placed, rank)

    def _send_counts(self, loads: Tensor, placed: PlacedLayers, rank: int | None = None) -> Tensor:
        slots = self.slots(placed)
        if rank is not None:
            loads, slots = loads.select(-2, rank), slots.select(-2, rank)
        send_counts = loads.new_zeros((*loads.shape[:-1], placed.host.num_slots))
        return send_counts.scatter_(-1, slots.expand(loads.shape), loads)

    def slots(self, placed: PlacedLayers) -> Tensor:
        """Return the [..., R, E] int64 slot that each source rank uses for each expert; drawn once per placement."""
        return placed.memo(self, partial(static_slots, seed=self.seed))


def static_slots(host: Placement, layer: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    topology, size = host.topology, host.slots_per_rank
    per_node = size * topology.ranks_per_node
    chosen = np.empty((topology.num_ranks, host.num_routed), dtype=np.int64)
    draw = np.random.default_rng((seed, layer))
    for expert, replicas in enumerate(replicas_of(host, layer)):
        if len(replicas) == 1:
            chosen[:, expert] = replicas[0]
            continue
        slots = np.full(topology.num_ranks, -1, dtype=np.int64)
        for near in replicas[::-1]:  # the lowest of a node's replicas comes last, so it remains
            first = near // per_node * topology.ranks_per_node
            slots[first : first + topology.ranks_per_node] = near
        slots[replicas // size] = replicas
        chosen[:, expert] = slots
        far = np.flatnonzero(slots < 0)
        # A fair draw: the numbers of far ranks per replica differ by at most one.
        rounds = -(-len(far) // len(replicas))
        turns = draw.permuted(np.tile(replicas, (rounds, 1)), axis=1).ravel()
        chosen[far, expert] = draw.permutation(turns[: len(far)])
    return chosen


def replicas_of(host: Placement, layer: int) -> list[IntArray]:
    """Return each routed expert's slots, ascending; of two slots on one rank the lower, which has the weights."""
    slots = host.arrays[0][layer]
    order = np.argsort(slots, kind="stable").astype(np.int32)  # by expert, then slot
    expert, rank = slots[order], order // host.slots_per_rank
    again = (expert[1:] == expert[:-1]) & (rank[1:] == rank[:-1])
    first_slots = order[np.concatenate([[True], ~again])]
    cuts = np.searchsorted(slots[first_slots], np.arange(host.num_routed + 1))
    return [first_slots[low:high] for low, high in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class ExactActivePolicy(Policy):
    """Every expert on one replica, so that the busiest rank reads the fewest slots.

    In a small decode batch a rank waits for the weights of its active slots, not for its copies. Among the optima the
    policy prefers a low peak in copies, without regard to the ranks' speeds. Peak and bound of the plan count copies,
    as for ``exact``; the last telemetry value is the number of experts moved for the peak.
    """

    name = "exact_active"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        active = ops.plan_active(demand.loads, placed.tables)
        return chosen_plan(self, active.quota, demand, placed, active.telemetry)


Precision = Literal["float32", "float64"]


def refuse_speeds(policy: str, placement: Placement) -> None:
    if placement.topology.speeds is not None:
        raise ValueError(f"speeds must be None for policy {policy}, which counts copies: use policy exact")


@dataclass(frozen=True)
class LpPolicy(Policy):
    """The real-valued optimum (papers/001) by an interior point method, rounded to whole copies.

    The peak is within one copy per replica of the least peak. ``exact`` finds the least peak itself and is faster;
    ``lp`` cross-checks it. Telemetry: iterations, status (0 converged, 1 iteration limit reached, 2 numerical
    breakdown: the split is even), 0, 0.
    """

    name = "lp"
    removed: ClassVar[Mapping[str, str]] = {
        "method": "use policy lp_sampled, which has the split of method affine"
    }
    precision: Precision = "float32"
    tolerance: float | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("tolerance", self.tolerance, 0, 1, " (relative)")
        check_range("iterations", self.iterations, 0, 1000)

    def check(self, placement: Placement) -> None:
        refuse_speeds(self.name, placement)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return rounded_plan(self, self.relax(demand, placed), demand, placed)

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        return ops.plan_lp(
            demand.loads,
            placed.tables,
            base=None if demand.local_shared is None else demand.local_shared.to(dtype),
            dtype=dtype,
            tolerance=self.tolerance,
            iterations=self.iterations,
        )


def rounded_plan(policy: Policy, relaxed: ops.LpSplit, demand: Demand, placed: PlacedLayers) -> Plan:
    quota = ops.round_split(relaxed.split, demand.loads, placed.tables)
    return chosen_plan(policy, quota, demand, placed, telemetry(relaxed))


def telemetry(relaxed: ops.LpSplit) -> torch.Tensor:
    zero = torch.zeros_like(relaxed.status)
    return torch.stack([relaxed.iterations, relaxed.status, zero, zero], dim=-1)
