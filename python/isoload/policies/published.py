"""Policies as others published them, for comparison.

``dynamic`` is SGLang's random replica. ``lp_sampled`` draws replicas with the probabilities of LPLB's linear
program; ``waterfill_sampled`` draws the rank of a token's shared expert. ``llep_published`` is LLEP's planner
(papers/003): rule "paper" is Algorithms 2 and 3 as printed, rule "code" the authors' code. It was written from the
paper and from a description of the code, neither of which is in this repository. ``libra_published`` is Algorithms
1 and 2 of Libra (papers/004): where the listings leave a choice open, ties go to the lowest rank, then to the
lowest home slot, and the balanced load B is the mean rounded up, because copies are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.checks import capturing, check_range, put_on
from isoload.ops.results import LpSplit
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.base import Demand, Policy, Seeded, chosen_plan, sample_seed, sampled_plan, sum_sources
from isoload.policies.borrowing import BorrowPolicy, check_rules
from isoload.policies.lp import LpPolicy, telemetry
from isoload.policies.plan import Plan, SharedPlan
from isoload.policies.shared import SharedPolicy, bound_with_shared, rank_copies
from isoload.traces import read_trace

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def read_batch(policy: str, *tensors: Tensor) -> list[Ints]:
    """Return int64 arrays of the tensors. For CUDA tensors the host waits once, for all of them.

    Raises:
        ValueError: a CUDA graph is captured, in which the host can read nothing.
    """
    device = tensors[0].device
    if capturing(device):
        raise ValueError(
            f"policy {policy} must not run while a CUDA graph is captured, because it plans on the CPU: use libra, "
            "hedge or llep"
        )
    flat = np.array(torch.cat([tensor.reshape(-1) for tensor in tensors]).tolist(), dtype=np.int64)
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = zip(np.split(flat, ends), tensors, strict=True)
    return [part.reshape(tuple(tensor.shape)) for part, tensor in parts]


def write_batch(device: torch.device, *arrays: Ints) -> list[Tensor]:
    """Return int32 tensors of the arrays on a device. The host does not wait."""
    flat = put_on(device, np.concatenate([array.ravel() for array in arrays]).tolist()).to(torch.int32)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


@dataclass(frozen=True)
class DynamicPolicy(Seeded):
    """Each copy draws one of its expert's replicas at random, all equally likely (SGLang ``dynamic``).

    Options: seed, and step (the batch's number), which together with layer and rank select the random stream.
    """

    name = "dynamic"
    samples = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return sampled_plan(self, placed.tables.is_replica().to(torch.float32), demand, placed)


@dataclass(frozen=True)
class WaterfillSampledPolicy(Seeded, SharedPolicy):
    """Every token draws its shared expert's rank: the published Waterfill, for comparison.

    Options: rule: "static" and "dynamic" are SGLang's two forms, "blog" is papers/001's formula for visited ranks and
    the own one, "blog_all" for all ranks, "recorded" is "blog" by the rank loads of a recorded trace, scaled to the own
    copies, so that nothing need be exchanged; recorded, the trace's file; routed as in ``shared_local``; seed and step
    (the batch's number) select the random stream of "blog" and what is like it.
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
    """[L, E] copies of a trace."""
    counts: np.ndarray[Any, Any] = read_trace(path).batch_counts().sum(0)
    return counts


def rank_parts(host: Placement, layer: int, path: str) -> np.ndarray[Any, Any]:
    """[R] float64 each rank's part of a layer's recorded copies, an expert's spread evenly over its slots."""
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
    """What of a layer's loads can move: a replicated expert's part on each of its ranks.

    slot, expert, rank  [n] of a part; expert counts the replicated ones, 0..N-1
    load    [N] copies of each replicated expert
    solo    [R] copies that cannot move
    """

    slot: Array
    expert: Array
    rank: Array
    load: Array
    solo: Array


class Program(NamedTuple):
    """Minimise cost @ x for matrix @ x = right and x >= 0; the columns are explained in :func:`standard_form`."""

    matrix: Array
    right: Array
    cost: Array


def plan_affine(
    loads: Tensor, slot_to_expert: Tensor, num_ranks: int, base: Tensor | None = None, iterations: int = 5
) -> LpSplit:
    """The published solver's split, in place of :func:`isoload.ops.plan_lp`; on the CPU alone.

    Args:
        loads: [E] copies (leading L as slot_to_expert).
        slot_to_expert: [P]; -1 = none, and so are ids from E on. An expert's slots on one rank are one, the lowest.
        num_ranks: R.
        base: [R] copies that each rank carries besides.
        iterations: steps of affine scaling. More than about eight are worse: float32 breaks down.

    Returns:
        split in float64, its peak as primal, and 0 as dual, since it proves no bound; status 2 where the published test
        does not accept the split, which is then the even one, else 0.
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
    """[P] split, its largest rank load and the status of one layer."""
    split = np.zeros(len(slots))
    parts = movable_parts(loads, slots, base, split)
    accepted = True
    if parts.load.any():
        shares, accepted = scale(standard_form(parts), len(parts.slot), steps)
        split[parts.slot] = shares * (parts.load / np.bincount(parts.expert, shares))[parts.expert]
    peak = float((split.reshape(len(base), -1).sum(1) + base).max())
    return split, peak, 0 if accepted else 2


def movable_parts(loads: Array, slots: Array, base: Array, split: Array) -> Parts:
    """The parts; the load of experts with one rank is written to split [P]."""
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
    """The program over a part's share, a slack per rank, the peak, and the big-M column that makes x = 1 feasible."""
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
    """[num_parts] shares of the parts, and whether they are accepted; else all are 0.5."""
    matrix, right, cost = program
    x, largest = np.ones_like(cost), np.float32(np.inf)
    with np.errstate(all="ignore"):  # what breaks down is not accepted
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


MILLION = 1_000_000
FULL = 2**62  # the load of a rank that cannot take a copy


@dataclass(frozen=True)
class LibraPublishedPolicy(BorrowPolicy):
    """Libra's replication and sharding as printed, on the CPU; for CUDA loads the host waits once.

    Copies whose expert has a slot on their own rank stay there. Kept faults: the replication ends at its first refusal,
    and sharding may move more copies than a rank has too many.

    Options: alpha (part of the slots for the experts that the rank's own tokens choose most), tolerance (of the
    balanced load, relative), slots (most that are filled per rank; None = all spare ones).
    """

    name = "libra_published"
    ahead = True
    keeps_local = True
    plans_on_host = True
    needs = "per_source"
    alpha: float = 0.5
    tolerance: float = 0.0
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("alpha", self.alpha, 0, 1)
        check_range("tolerance", self.tolerance, 0, 1000)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """The slots by Algorithm 1, with the quota of the same loads by Algorithm 2: one wait serves both."""
        layers = layers_of(demand, placed, placed.resident.slot_to_expert)
        slots = placed.spare_slots if self.slots is None else self.slots
        # 0.3 of 10 are 3, although the float is a little less.
        local = round(self.alpha * MILLION) * slots // MILLION
        plans = []
        for layer in layers:
            borrowed = replicate(layer, slots, local)
            filled = layer.slots.copy()
            for rank, expert in borrowed:
                start, end = (rank + 1) * layer.size - slots, (rank + 1) * layer.size
                filled[start + int((filled[start:end] < 0).argmax())] = expert
            telemetry = counted(layer, filled, placed)
            plans.append((filled, shard(layer._replace(slots=filled), self.tolerance), telemetry))
        shape = placed.slot_to_expert.shape
        filled, quota, telemetry = (np.stack(part) for part in zip(*plans, strict=True))
        rows = (filled.reshape(shape), quota.reshape(shape), telemetry.reshape(*shape[:-1], -1))
        slot_to_expert, split, about = write_batch(placed.slot_to_expert.device, *rows)
        return placed.fill(slot_to_expert, split, about)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        quota = placed.quota
        if quota is None:  # the slots were filled from other loads
            layers = layers_of(demand, placed, placed.slot_to_expert)
            rows = np.stack([shard(layer, self.tolerance) for layer in layers])
            quota = write_batch(placed.slot_to_expert.device, rows.reshape(placed.slot_to_expert.shape))[0]
        return chosen_plan(self, quota, demand, placed, placed.telemetry)


class Layer(NamedTuple):
    """One layer's batch.

    loads  [R, E]  copies by source rank and routed expert
    slots  [P]     the expert of each slot
    home   [E]     home slots
    base   [R]     copies that every rank carries besides
    alive  [R]     bool
    """

    loads: Ints
    slots: Ints
    home: Ints
    base: Ints
    alive: Ints

    @property
    def size(self) -> int:
        """Slots of a rank."""
        return len(self.slots) // len(self.loads)

    @property
    def target(self) -> int:
        """B, the balanced load: the mean over the living ranks, rounded up."""
        return -(-int(self.loads.sum() + self.base.sum()) // int(self.alive.sum()))

    def first_slots(self) -> Ints:
        """[R, E] the lowest slot of every expert on every rank, -1 = none."""
        ranks, experts = self.loads.shape
        slots = np.full((ranks, experts + 1), -1)
        rows = self.slots.reshape(ranks, -1)
        for place in reversed(range(self.size)):
            expert_ids = rows[:, place]
            column = np.where((expert_ids >= 0) & (expert_ids < experts), expert_ids, experts)
            slots[np.arange(ranks), column] = np.arange(ranks) * self.size + place
        return slots[:, :experts]


def layers_of(demand: Demand, placed: PlacedLayers, slots: Tensor) -> list[Layer]:
    """The batch on the host, layer by layer."""
    tensors = [demand.loads, slots] if demand.at_home is None else [demand.loads, slots, demand.at_home]
    loads, slots_by_layer, *besides = read_batch(LibraPublishedPolicy.name, *tensors)
    ranks, routed = placed.topology.num_ranks, placed.host.num_routed
    loads, slots_by_layer = (
        loads.reshape(-1, ranks, routed),
        slots_by_layer.reshape(-1, placed.host.num_slots),
    )
    base = besides[0].reshape(-1, ranks) if besides else np.zeros((len(loads), ranks), dtype=np.int64)
    homes = placed.host.arrays[1][:, :routed].astype(np.int64)
    homes = homes if placed.layer is None else homes[placed.layer : placed.layer + 1]
    alive = np.ones(ranks, dtype=bool)
    if placed.topology.alive is not None:
        alive = np.array(placed.topology.alive)
    return [Layer(*parts, alive) for parts in zip(loads, slots_by_layer, homes, base, strict=True)]


def replicate(layer: Layer, slots: int, local: int) -> list[tuple[int, int]]:
    """Algorithm 1: the (rank, expert) that are borrowed, in order.

    Args:
        slots: N, the most experts that a rank borrows, into its last slots where these are empty.
        local: L, how many of them are the rank's own choice.
    """
    loads, target, ranks = layer.loads, layer.target, len(layer.loads)
    resident, owner = layer.first_slots() >= 0, layer.home // layer.size
    room = (layer.slots.reshape(ranks, -1)[:, layer.size - slots :] < 0).sum(1) * layer.alive
    borrowed = list[tuple[int, int]]()

    def duplicate(rank: int, expert: int) -> None:
        resident[rank, expert] = True
        room[rank] -= 1
        borrowed.append((rank, expert))

    for rank in range(ranks):
        wanted = np.where(resident[rank], 0, loads[rank])
        for expert in np.argsort(-wanted, kind="stable")[: min(local, int(room[rank]))].tolist():
            if wanted[expert]:
                duplicate(rank, expert)
    remote = np.where(resident, 0, loads).sum(0)
    load = (
        layer.base + np.where(resident, loads, 0).sum(1) + np.bincount(owner, remote, ranks).astype(np.int64)
    )
    by_home = np.argsort(layer.home)
    for _ in range((slots - local) * ranks):
        source = int(load.argmax())
        if load[source] <= target:
            break
        hottest = np.where(owner == source, remote, 0)[by_home]
        expert = int(by_home[hottest.argmax()])
        able = (room > 0) & ~resident[:, expert]
        taker = int(np.where(able, load, FULL).argmin())
        copies = int(loads[taker, expert])
        if not hottest.any() or not able[taker] or load[taker] + copies > target:
            break  # every later step would meet the same refusal
        duplicate(taker, expert)
        remote[expert] -= copies
        load[source] -= copies
        load[taker] += copies
    return borrowed


def shard(layer: Layer, tolerance: float = 0.0) -> Ints:
    """Algorithm 2: the quota [P], with all local copies on their own rank."""
    loads, target = layer.loads, layer.target
    first, owner, experts = layer.first_slots(), layer.home // layer.size, np.arange(len(layer.home))
    resident = first >= 0
    copies = np.where(resident, loads, 0)  # [R, E] computed on each rank
    remote = np.zeros_like(copies)  # R of the listing: those of them that may move
    remote[owner, experts] = np.where(resident, 0, loads).sum(0)
    copies += remote
    load = layer.base + copies.sum(1)
    limit, moved = target * (MILLION + round(tolerance * MILLION)), True
    by_home = np.argsort(layer.home)
    while moved and int(load.max()) * MILLION > limit:
        moved = False
        for source in np.argsort(-load, kind="stable")[: int((load > target).sum())].tolist():
            row = remote[source, by_home]
            for expert in by_home[np.argsort(-row, kind="stable")[: np.count_nonzero(row)]].tolist():
                able = resident[:, expert].copy()
                able[source] = False
                taker = int(np.where(able, load, FULL).argmin())
                if not able[taker] or load[taker] >= target:
                    continue
                part = min(int(remote[source, expert]), int(target - load[taker]))
                for grid in (remote, copies):
                    grid[source, expert] -= part
                    grid[taker, expert] += part
                load[source] -= part
                load[taker] += part
                moved = True
                break
    quota = np.zeros(len(layer.slots), dtype=np.int64)
    quota[first[resident]] = copies[resident]
    return quota


def counted(layer: Layer, filled: Ints, placed: PlacedLayers) -> Ints:
    """[5] telemetry of filled slots, see :class:`isoload.ops.Spill`."""
    per_node = placed.topology.ranks_per_node or len(layer.loads)
    borrowed = np.flatnonzero((filled >= 0) & (layer.slots < 0))
    takers, givers = borrowed // layer.size, layer.home[filled[borrowed]] // layer.size
    busiest = [int(np.bincount(some, minlength=1).max()) for some in (takers, givers)]
    far = int((takers // per_node != givers // per_node).sum())
    return np.array([len(borrowed), *busiest, far, 0])


Rule = Literal["code", "paper"]


@dataclass(frozen=True)
class LlepPublishedPolicy(BorrowPolicy):
    """The published planner's segments as a plan, for comparison, and only where the segments fit.

    It bounds neither imports nor loads. Two segments of one expert on one rank become one. Needs E / R experts per
    rank in order, without replicas, shared experts or ranks that are not alive. Plans on the CPU; for CUDA loads the
    host waits once.

    Options: as of ``llep``; capacity and threshold have the published defaults. rule: "code", the authors' code, or
    "paper", the listings, where helpers are sorted again for every chunk and the capacity is rounded down once.
    """

    name = "llep_published"
    plans_on_host = True
    rule: Rule = "code"
    split_by: str | Policy = "fill"
    capacity: float = 1.1
    min_chunk: int = 1024
    threshold: float = 0.0
    measure: str = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        loads = sum_sources(demand.loads, placed)
        ranks, size = placed.topology.num_ranks, placed.host.slots_per_rank
        experts, (resident, homes) = loads.shape[-1], placed.host.arrays
        layers = slice(None) if placed.layer is None else slice(placed.layer, placed.layer + 1)
        wanted = np.arange(experts) // max(1, experts // ranks)
        if experts % ranks or placed.num_shared or not (homes[layers] // size == wanted).all():
            raise ValueError(
                f"placement must hold experts 0..{experts - 1} in order, {experts}/{ranks} per rank, and no shared "
                "ones for policy llep_published"
            )
        (counts,) = read_batch(self.name, loads)
        rows = [
            self._fit(row, slots, ranks, placed.spare_slots)
            for row, slots in zip(
                counts.reshape(-1, experts).tolist(), resident[layers].tolist(), strict=True
            )
        ]
        shape = placed.slot_to_expert.shape[:-1]
        parts = (np.array(part).reshape(*shape, -1) for part in zip(*rows, strict=True))
        filled, quota, telemetry = write_batch(placed.slot_to_expert.device, *parts)
        return placed.fill(filled, quota, telemetry)

    def _fit(self, counts: list[int], slots: list[int], ranks: int, spare: int) -> list[list[int]]:
        """One layer's segments as slots, quota and telemetry."""
        size = len(slots) // ranks
        plain = imbalance(counts, ranks, self.measure == "expert") <= self.threshold
        segments = [Segment(e, e * ranks // len(counts), 0, n) for e, n in enumerate(counts) if n]  # plain EP
        if not plain:
            segments = llep_published(counts, ranks, self.capacity, self.min_chunk, self.rule)
        filled, quota = list(slots), [0] * len(slots)
        imports, exports = [0] * ranks, [0] * ranks
        for expert, rank, first, last in segments:
            row = filled[rank * size : (rank + 1) * size]
            if expert not in row:
                if imports[rank] == spare:
                    raise ValueError(
                        f"spare_slots must hold the published plan, rank {rank} imports more than {spare} experts"
                    )
                row[size - spare + imports[rank]] = expert
                filled[rank * size : (rank + 1) * size] = row
                imports[rank] += 1
                exports[expert * ranks // len(counts)] += 1
            quota[rank * size + row.index(expert)] += last - first
        telemetry = [sum(imports), max(imports), max(exports), 0, int(plain)]
        return [filled, quota, telemetry]


class Segment(NamedTuple):
    """Copies first..last-1 of an expert, in the order of their source ranks, are computed on a rank."""

    expert: int
    rank: int
    first: int
    last: int


def imbalance(counts: list[int], num_ranks: int, per_expert: bool = False) -> float:
    """max / mean load of the ranks under plain EP, or of the experts; 1 without copies."""
    per_rank = len(counts) // num_ranks
    ranks = [sum(counts[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
    loads = counts if per_expert else ranks
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def llep_published(
    counts: list[int],
    num_ranks: int,
    capacity_factor: float = 1.1,
    min_chunk: int = 1024,
    rule: Rule = "code",
) -> list[Segment]:
    """Every expert's copies in segments, in the order in which they are decided.

    Its faults, kept: what no rank has room for is forced onto one helper above its capacity, also where that helper
    has just got a segment of the same expert, and nothing goes back to the home rank. The code alone rounds the
    capacity down twice.

    Args:
        counts: [E] copies; expert e lives on rank e // (E / R).
        num_ranks: R, divides E.
        capacity_factor: a rank's capacity, times the mean load.
        min_chunk: a helper with less room than this and than the rest is passed over.
        rule: "code" or "paper".
    """
    per_rank, total_load = len(counts) // num_ranks, sum(counts)
    capacity = max(1, int(capacity_factor * (total_load // num_ranks)))
    if rule == "paper":
        capacity = round(capacity_factor * MILLION) * total_load // (num_ranks * MILLION)
    # copies that a rank has, or will have from its own experts that are still to be placed
    load = [sum(counts[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
    segments: list[Segment] = []

    def chunk(helper: int, left: int) -> int:
        """What a helper takes of the rest; 0 = it is passed over."""
        copies = min(left, capacity - load[helper])
        return 0 if copies <= 0 or (copies < min_chunk and left > copies) else copies

    def assign(expert: int, rank: int, first: int, copies: int) -> int:
        segments.append(Segment(expert, rank, first, first + copies))
        load[rank] += copies
        return first + copies

    for expert in sorted(filter(counts.__getitem__, range(len(counts))), key=lambda e: -counts[e]):
        home, total, done = expert // per_rank, counts[expert], 0
        load[home] -= total
        if room := max(0, capacity - load[home]):
            done = assign(expert, home, 0, min(total, room))
        helpers: list[int] = []
        while done < total:
            # The listing sorts for every chunk, the code only once for an expert whose home rank took none of it.
            if rule == "paper" or room or not helpers:
                helpers = sorted((r for r in range(num_ranks) if r != home), key=load.__getitem__)
                asked = iter(helpers)
            taker = next((r for r in asked if chunk(r, total - done)), None)
            copies = total - done if taker is None else chunk(taker, total - done)
            done = assign(expert, helpers[0] if taker is None else taker, done, copies)
    return segments


Method = Literal["interior", "affine"]


@dataclass(frozen=True)
class LpSampledPolicy(Seeded, LpPolicy):
    """Each copy draws its replica with the real-valued split's probabilities: the published LPLB, but its solver.

    Options: as ``lp``; method: "interior", or "affine", which is the published solver (on the CPU, without precision or
    tolerance; iterations=None takes five steps); seed and step (the batch's number), which together with layer and rank
    select the random stream.
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
        """The real-valued split."""
        if self.method == "interior":
            return super().relax(demand, placed)
        loads, ranks = sum_sources(demand.loads, placed), placed.topology.num_ranks
        steps = 5 if self.iterations is None else self.iterations
        return plan_affine(loads, placed.slot_to_expert, ranks, demand.at_home, steps)
