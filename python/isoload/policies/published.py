"""Sampled policies as others published them: ``dynamic``, ``lp_sampled`` and ``waterfill_sampled``, for comparison."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.ops.results import LpSplit
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.base import Demand, Seeded, sample_seed, sampled_plan, sum_sources
from isoload.policies.exact import LpPolicy, telemetry
from isoload.policies.plan import Plan, SharedPlan
from isoload.policies.shared import SharedPolicy, bound_with_shared, rank_copies
from isoload.traces import read_trace


@dataclass(frozen=True)
class DynamicPolicy(Seeded):
    """Each copy draws one of its expert's replicas at random, all equally likely (SGLang ``dynamic``)."""

    name = "dynamic"
    samples = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return sampled_plan(self, placed.tables.is_replica().to(torch.float32), demand, placed)


@dataclass(frozen=True)
class WaterfillSampledPolicy(Seeded, SharedPolicy):
    """Every token draws its shared expert's rank: the published Waterfill, for comparison.

    Rules "static" and "dynamic" are SGLang's two forms; "blog" is papers/001's formula over visited ranks and the
    token's own rank, "blog_all" over all ranks; "recorded" is "blog" with the rank loads of a recorded trace, scaled to
    the rank's own copies, so that nothing is exchanged.
    """

    name = "waterfill_sampled"
    rule: Literal["static", "dynamic", "blog", "blog_all", "recorded"] = "static"
    recorded: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rule == "recorded") != (self.recorded is not None):
            raise ValueError(
                f"recorded must be a trace's file with rule recorded alone, got {self.recorded!r}"
            )

    def check(self, placement: Placement) -> None:
        super().check(placement)
        wanted = (placement.num_layers, placement.num_routed)
        if self.recorded is not None and (got := recorded_counts(self.recorded).shape) != wanted:
            raise ValueError(
                f"recorded must be a trace of {wanted} layers and experts, got {got} in {self.recorded}"
            )
        if placement.num_shared > 1:
            raise ValueError(
                f"num_shared must be at most 1 for policy {self.name}, got {placement.num_shared}"
            )
        if len(placement.topology.live_ranks) < placement.topology.num_ranks:
            raise ValueError(
                "topology must have all ranks alive for policy waterfill_sampled, which draws any of them"
            )

    def add_shared(self, plan: Plan, demand: Demand) -> Plan:
        assert demand.tokens is not None
        shared = SharedPlan("sample", demand.tokens, None, rank_copies(demand.loads, plan))
        bound = bound_with_shared(demand, plan.placed)
        return replace(plan, policy=self, peak=None, bound=bound, shared=shared)

    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor:
        assert plan.shared is not None and plan.shared.copies is not None
        copies, tokens = plan.shared.copies, plan.shared.tokens
        size = plan.placed.host.slots_per_rank
        if self.recorded is not None:
            parts = plan.placed.memo(self.recorded, partial(rank_parts, path=self.recorded))
            load = (parts * copies.select(0, rank).sum()).to(torch.int32)
            own_tokens = torch.zeros_like(tokens)
            own_tokens[rank] = tokens[rank]
            return ops.route_shared_sampled(
                slots, load, own_tokens, size, rank, "blog", *sample_seed(plan, rank)
            )
        assert self.rule != "recorded"
        load = copies.select(0, rank) if self.rule == "static" else copies.sum(0, dtype=torch.int32)
        return ops.route_shared_sampled(slots, load, tokens, size, rank, self.rule, *sample_seed(plan, rank))


@lru_cache(maxsize=4)
def recorded_counts(path: str) -> np.ndarray[Any, Any]:
    counts: np.ndarray[Any, Any] = read_trace(path).batch_counts().sum(0)
    return counts


def rank_parts(host: Placement, layer: int, path: str) -> np.ndarray[Any, Any]:
    slots, counts = host.arrays[0][layer], recorded_counts(path)[layer]
    resident = (slots >= 0) & (slots < host.num_routed)
    per_replica = counts / np.maximum(1, np.bincount(slots[resident], minlength=len(counts)))
    per_slot = np.where(resident, per_replica[np.where(resident, slots, 0)], 0.0)
    parts: np.ndarray[Any, Any] = per_slot.reshape(host.topology.num_ranks, -1).sum(1)
    parts /= max(1, counts.sum())
    return parts


Array: TypeAlias = "np.ndarray[Any, Any]"
BIG_M, STEP, SMALLEST_PIVOT = 1000.0, np.float32(0.999), np.float32(1e-12)


class Parts(NamedTuple):
    """The part of a layer's loads that can move: a replicated expert's part on each of its ranks."""

    slot: Array  # [n] of a part
    expert: Array  # [n] counts the replicated ones, 0..N-1
    rank: Array  # [n] of a part
    load: Array  # [N] copies of each replicated expert
    solo: Array  # [R] copies that cannot move


class Program(NamedTuple):
    """Minimise cost @ x for matrix @ x = right and x >= 0; the columns are explained in :func:`standard_form`."""

    matrix: Array
    right: Array
    cost: Array


def plan_affine(
    loads: Tensor, slot_to_expert: Tensor, num_ranks: int, base: Tensor | None = None, iterations: int = 5
) -> LpSplit:
    """Return the split of the published solver in float64, with the interface of :func:`isoload.ops.plan_lp`; CPU only.

    Of an expert's slots on one rank only the lowest counts. More than about eight iterations give worse splits: float32
    breaks down. The split's peak is primal; dual is 0, because nothing is proved. Status 2 and an even split if the
    published test rejects the split, else status 0.
    """
    if loads.device.type != "cpu":
        raise ValueError(f"loads must be on the CPU for affine scaling, got {loads.device}")
    batch = loads.shape[:-1]
    base = torch.zeros(num_ranks, dtype=torch.int32) if base is None else base
    tensors = (loads, slot_to_expert, base.expand(*batch, num_ranks))
    rows = [tensor.reshape(-1, tensor.shape[-1]).numpy() for tensor in tensors]
    layers = [
        solve_layer(counts, slots, carried, iterations) for counts, slots, carried in zip(*rows, strict=True)
    ]
    split, peak, status = zip(*layers, strict=True)
    statuses = torch.tensor(status, dtype=torch.int32).view(batch)
    primal = torch.tensor(peak, dtype=torch.float64).view(batch)
    parts = torch.from_numpy(np.stack(split)).view(*batch, -1)
    return LpSplit(parts, primal, torch.zeros_like(primal), torch.full_like(statuses, iterations), statuses)


def solve_layer(loads: Array, slots: Array, base: Array, steps: int) -> tuple[Array, float, int]:
    split = np.zeros(len(slots))
    parts = movable_parts(loads, slots, base, split)
    accepted = True
    if parts.load.any():
        shares, accepted = scale(standard_form(parts), len(parts.slot), steps)
        split[parts.slot] = shares * (parts.load / np.bincount(parts.expert, shares))[parts.expert]
    peak = float((split.reshape(len(base), -1).sum(1) + base).max())
    return split, peak, 0 if accepted else 2


def movable_parts(loads: Array, slots: Array, base: Array, split: Array) -> Parts:
    """Return the parts, and write the load of experts with one rank to split [P]."""
    num_ranks, size = len(base), len(slots) // len(base)
    filled = np.flatnonzero((slots >= 0) & (slots < len(loads)))
    _, first = np.unique(slots[filled].astype(np.int64) * num_ranks + filled // size, return_index=True)
    filled = filled[first]  # the lowest slot of each pair of expert and rank, by expert
    ranks = np.bincount(slots[filled], minlength=len(loads))
    alone, moving = filled[ranks[slots[filled]] == 1], filled[ranks[slots[filled]] > 1]
    split[alone] = loads[slots[alone]]
    solo = split.reshape(num_ranks, size).sum(1) + base
    names, expert = np.unique(slots[moving], return_inverse=True)
    return Parts(moving, expert, moving // size, loads[names].astype(np.float64), solo)


def standard_form(parts: Parts) -> Program:
    """Return the program over parts' shares, a slack per rank, the peak, and a big-M column (x = 1 is feasible)."""
    experts, ranks, n = len(parts.load), len(parts.solo), len(parts.slot)
    matrix = np.zeros((experts + ranks, n + ranks + 2), dtype=np.float32)
    matrix[parts.expert, np.arange(n)] = matrix[experts + parts.rank, np.arange(n)] = 1
    matrix[experts + np.arange(ranks), n + np.arange(ranks)] = 1
    matrix[experts:, -2] = -1
    right = np.concatenate([parts.load, -parts.solo]) / (parts.load.sum() + parts.solo.sum())
    right = right.astype(np.float32)
    matrix[:, -1] = right - matrix[:, :-1].sum(1)
    cost = np.zeros(matrix.shape[1], dtype=np.float32)
    cost[-2:] = 1, BIG_M
    return Program(matrix, right, cost)


def scale(program: Program, num_parts: int, steps: int) -> tuple[Array, bool]:
    """Return [num_parts] shares of the parts, and whether they are accepted; otherwise all are 0.5."""
    matrix, right, cost = program
    x, largest = np.ones_like(cost), np.float32(np.inf)
    with np.errstate(all="ignore"):  # a result that broke down is not accepted
        for _ in range(steps):
            scaled = matrix * x**2
            normal = scaled @ matrix.T + SMALLEST_PIVOT * np.eye(len(right), dtype=np.float32)
            try:
                lower = np.linalg.cholesky(normal)
            except np.linalg.LinAlgError:
                return np.full(num_parts, 0.5), False
            prices = np.linalg.solve(lower.T, np.linalg.solve(lower, scaled @ cost))
            move = x * (cost - matrix.T @ prices)
            largest = move.max()
            x = x * (1 - (STEP / largest if largest > 1e-9 else 1) * move)
        missed = np.abs(matrix @ x - right).max()
    accepted = bool(largest < 0.1 and 0 <= x[-1] < 1e-4 and missed < 0.05 and (x > 0).all())
    return (x[:num_parts].astype(np.float64) if accepted else np.full(num_parts, 0.5)), accepted


Method = Literal["interior", "affine"]


@dataclass(frozen=True)
class LpSampledPolicy(Seeded, LpPolicy):
    """Each copy draws its replica with the real-valued split's probabilities: the published LPLB with another solver.

    Method "affine" is the published solver (on the CPU, without precision or tolerance; iterations=None takes five
    steps).
    """

    name = "lp_sampled"
    samples = True
    removed: ClassVar[Mapping[str, str]] = {}
    method: Method = "interior"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "affine" and (self.precision, self.tolerance) != ("float32", None):
            raise ValueError(
                "precision and tolerance must be left out with method affine, "
                f"got {self.precision} and {self.tolerance}"
            )

    @property
    def cpu_only(self) -> bool:
        return self.method == "affine"

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        relaxed = self.relax(demand, placed)
        return sampled_plan(self, relaxed.split.to(torch.float32), demand, placed, telemetry(relaxed))

    def relax(self, demand: Demand, placed: PlacedLayers) -> ops.LpSplit:
        if self.method == "interior":
            return super().relax(demand, placed)
        loads, ranks = sum_sources(demand.loads, placed), placed.topology.num_ranks
        steps = 5 if self.iterations is None else self.iterations
        return plan_affine(loads, placed.slot_to_expert, ranks, demand.local_shared, steps)
