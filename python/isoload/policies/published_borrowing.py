"""Policies ``llep_published`` and ``libra_published``: published listings that borrow weights, for comparison.

``llep_published`` is LLEP's planner (papers/003), by rule as printed or as the authors' code, written from the paper
and a description of the code; ``libra_published`` is Algorithms 1 and 2 of Libra (papers/004). Where the listings leave
a choice open, the lowest rank and then the lowest home slot wins, and the balanced load B is the mean rounded up. Both
plan on the host, layer by layer.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from isoload.checks import capturing, check_range, put_on
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, chosen_plan, sum_sources
from isoload.policies.borrowing import BorrowPolicy, check_rules, count_borrowed
from isoload.policies.plan import Plan

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def read_batch(policy: str, *tensors: Tensor) -> list[Ints]:
    """Return int64 arrays of the tensors. For CUDA tensors the host waits once, for all of them. Raises ValueError if a
    CUDA graph is captured, in which the host can read nothing."""
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
    flat = put_on(device, np.concatenate([array.ravel() for array in arrays]).tolist()).to(torch.int32)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


MILLION = 1_000_000
FULL = 2**62  # load of a rank that cannot take a copy


@dataclass(frozen=True)
class LibraPublishedPolicy(BorrowPolicy):
    """Libra's replication and sharding as printed, on the CPU; for CUDA loads the host waits once.

    Copies whose expert has a slot on their own rank stay there. Two faults of the listings are kept: replication ends
    at its first refusal, and sharding may move more copies than a rank's excess.
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
        """Fill the slots by Algorithm 1, and attach the quota by Algorithm 2, with one wait for both."""
        layers = layers_of(demand, placed, placed.resident.slot_to_expert)
        slots = placed.spare_slots if self.slots is None else self.slots
        # In exact arithmetic 0.3 of 10 is 3; in floats the product may be slightly less.
        local = round(self.alpha * MILLION) * slots // MILLION
        plans = []
        for layer in layers:
            borrowed = replicate(layer, slots, local)
            filled = layer.slots.copy()
            for rank, expert in borrowed:
                start, end = (rank + 1) * layer.size - slots, (rank + 1) * layer.size
                filled[start + int((filled[start:end] < 0).argmax())] = expert
            plans.append((filled, shard(layer._replace(slots=filled), self.tolerance)))
        rows = (np.stack(part).reshape(placed.slot_to_expert.shape) for part in zip(*plans, strict=True))
        slot_to_expert, quota = write_batch(placed.slot_to_expert.device, *rows)
        return placed.fill(slot_to_expert, quota, count_borrowed(slot_to_expert, placed.resident))

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        quota = placed.quota
        if quota is None:  # the slots were filled from other loads
            layers = layers_of(demand, placed, placed.slot_to_expert)
            rows = np.stack([shard(layer, self.tolerance) for layer in layers])
            quota = write_batch(placed.slot_to_expert.device, rows.reshape(placed.slot_to_expert.shape))[0]
        return chosen_plan(self, quota, demand, placed, placed.telemetry)


class Layer(NamedTuple):
    """One layer's batch."""

    loads: Ints  # [R, E] copies by source rank and routed expert
    slots: Ints  # [P] the expert of each slot
    home: Ints  # [E] home slots
    base: Ints  # [R] copies that every rank carries in addition
    alive: Ints  # [R] bool

    @property
    def size(self) -> int:
        return len(self.slots) // len(self.loads)

    @property
    def target(self) -> int:
        """B, the balanced load: the mean over the live ranks, rounded up."""
        return -(-int(self.loads.sum() + self.base.sum()) // int(self.alive.sum()))

    def first_slots(self) -> Ints:
        ranks, experts = self.loads.shape
        slots = np.full((ranks, experts + 1), -1)
        rows = self.slots.reshape(ranks, -1)
        for place in reversed(range(self.size)):
            expert_ids = rows[:, place]
            column = np.where((expert_ids >= 0) & (expert_ids < experts), expert_ids, experts)
            slots[np.arange(ranks), column] = np.arange(ranks) * self.size + place
        return slots[:, :experts]


def layers_of(demand: Demand, placed: PlacedLayers, slots: Tensor) -> list[Layer]:
    shared = [] if demand.local_shared is None else [demand.local_shared]
    loads, slots_by_layer, *besides = read_batch(LibraPublishedPolicy.name, demand.loads, slots, *shared)
    ranks, routed = placed.topology.num_ranks, placed.host.num_routed
    loads = loads.reshape(-1, ranks, routed)
    slots_by_layer = slots_by_layer.reshape(-1, placed.host.num_slots)
    base = besides[0].reshape(-1, ranks) if besides else np.zeros((len(loads), ranks), dtype=np.int64)
    homes = placed.host.arrays[1][:, :routed].astype(np.int64)
    homes = homes if placed.layer is None else homes[placed.layer : placed.layer + 1]
    alive = np.ones(ranks, dtype=bool)
    if placed.topology.alive is not None:
        alive = np.array(placed.topology.alive)
    return [Layer(*parts, alive) for parts in zip(loads, slots_by_layer, homes, base, strict=True)]


def replicate(layer: Layer, slots: int, local: int) -> list[tuple[int, int]]:
    """Run Algorithm 1: return the (rank, expert) pairs that are borrowed, in order. `slots` is N, the largest number of
    experts that a rank borrows, into its last slots if these are empty; `local` is L, how many of them are the rank's
    own choice."""
    loads, target, ranks = layer.loads, layer.target, len(layer.loads)
    resident, owner = layer.first_slots() >= 0, layer.home // layer.size
    free = (layer.slots.reshape(ranks, -1)[:, layer.size - slots :] < 0).sum(1) * layer.alive
    borrowed = list[tuple[int, int]]()

    def duplicate(rank: int, expert: int) -> None:
        resident[rank, expert] = True
        free[rank] -= 1
        borrowed.append((rank, expert))

    for rank in range(ranks):
        wanted = np.where(resident[rank], 0, loads[rank])
        for expert in np.argsort(-wanted, kind="stable")[: min(local, int(free[rank]))].tolist():
            if wanted[expert]:
                duplicate(rank, expert)
    remote = np.where(resident, 0, loads).sum(0)
    load = layer.base + np.where(resident, loads, 0).sum(1)
    load += np.bincount(owner, remote, ranks).astype(np.int64)
    by_home = np.argsort(layer.home)
    for _ in range((slots - local) * ranks):
        source = int(load.argmax())
        if load[source] <= target:
            break
        hottest = np.where(owner == source, remote, 0)[by_home]
        expert = int(by_home[hottest.argmax()])
        able = (free > 0) & ~resident[:, expert]
        taker = int(np.where(able, load, FULL).argmin())
        copies = int(loads[taker, expert])
        if not hottest.any() or not able[taker] or load[taker] + copies > target:
            break  # every later step would be refused for the same reason
        duplicate(taker, expert)
        remote[expert] -= copies
        load[source] -= copies
        load[taker] += copies
    return borrowed


def shard(layer: Layer, tolerance: float = 0.0) -> Ints:
    """Run Algorithm 2: return the quota [P], with all local copies on their own rank."""
    loads, target = layer.loads, layer.target
    first, owner, experts = layer.first_slots(), layer.home // layer.size, np.arange(len(layer.home))
    resident = first >= 0
    copies = np.where(resident, loads, 0)  # [R, E] computed on each rank
    remote = np.zeros_like(copies)  # R of the listing: copies that may move
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


Rule = Literal["code", "paper"]


@dataclass(frozen=True)
class LlepPublishedPolicy(BorrowPolicy):
    """The published planner's segments as a plan, for comparison; raises where the segments need too many slots.

    The planner bounds neither imports nor loads. Two segments of one expert on one rank become one. It needs E / R
    experts per rank in order, without replicas, shared experts or dead ranks. It plans on the CPU; for CUDA loads the
    host waits once. Rule "paper" sorts helpers again for every chunk and rounds the capacity down once.
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
                f"policy llep_published needs experts 0..{experts - 1} in order, {experts}/{ranks} per rank "
                "(placer trivial), and no shared experts"
            )
        (counts,) = read_batch(self.name, loads)
        batches = zip(counts.reshape(-1, experts).tolist(), resident[layers].tolist(), strict=True)
        rows = [self._fit(row, slots, ranks, placed.spare_slots) for row, slots in batches]
        shape = placed.slot_to_expert.shape[:-1]
        parts = (np.array(part).reshape(*shape, -1) for part in zip(*rows, strict=True))
        filled, quota, telemetry = write_batch(placed.slot_to_expert.device, *parts)
        return placed.fill(filled, quota, telemetry)

    def _fit(self, counts: list[int], slots: list[int], ranks: int, spare: int) -> list[list[int]]:
        size = len(slots) // ranks
        ratio = imbalance(counts, ranks, self.measure == "expert")
        plain = ratio < self.threshold if self.rule == "paper" else ratio <= self.threshold
        # Plain expert parallelism.
        segments = [Segment(e, e * ranks // len(counts), 0, n) for e, n in enumerate(counts) if n]
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
    """Return the max / mean load of the ranks under plain EP, or of the experts; 1 without copies."""
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
    """Return every expert's copies [E] in segments, in the order in which the planner decides them.

    Expert e is on rank e // (E / R). Faults that are kept: copies that no rank can take below its capacity are forced
    onto one helper, even if that helper has just got a segment of the same expert, and no copy returns to the home
    rank. Only the code rounds the capacity down twice. A helper is skipped if its free capacity is below min_chunk and
    below the rest.
    """
    per_rank, total_load = len(counts) // num_ranks, sum(counts)
    capacity = max(1, int(capacity_factor * (total_load // num_ranks)))
    if rule == "paper":
        capacity = round(capacity_factor * MILLION) * total_load // (num_ranks * MILLION)
    # Copies that a rank has, or will have from those of its own experts that are not placed yet.
    load = [sum(counts[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
    segments: list[Segment] = []

    def chunk(helper: int, left: int) -> int:
        """Return how many copies a helper takes of the rest; 0 = the helper is skipped."""
        copies = min(left, capacity - load[helper])
        return 0 if copies <= 0 or (copies < min_chunk and left > copies) else copies

    def assign(expert: int, rank: int, first: int, copies: int) -> int:
        segments.append(Segment(expert, rank, first, first + copies))
        load[rank] += copies
        return first + copies

    for expert in sorted(filter(counts.__getitem__, range(len(counts))), key=lambda e: -counts[e]):
        home, total, done = expert // per_rank, counts[expert], 0
        load[home] -= total
        if free := max(0, capacity - load[home]):
            done = assign(expert, home, 0, min(total, free))
        helpers: list[int] = []
        while done < total:
            # The listing sorts for every chunk, the code once per expert unless its home rank took a part.
            if rule == "paper" or free or not helpers:
                helpers = sorted((r for r in range(num_ranks) if r != home), key=load.__getitem__)
                asked = iter(helpers)
            taker = next((r for r in asked if chunk(r, total - done)), None)
            copies = total - done if taker is None else chunk(taker, total - done)
            done = assign(expert, helpers[0] if taker is None else taker, done, copies)
    return segments
