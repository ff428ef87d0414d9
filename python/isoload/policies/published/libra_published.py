"""Policy ``libra_published``: Libra's Algorithms 1 and 2 (papers/004) as printed, to compare with.

Plain NumPy on the host, one layer at a time. Where the listings leave a choice open, ties go to the lowest rank, then
to the lowest home slot, and the balanced load B is the mean rounded up, because copies are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, chosen_plan
from isoload.policies.borrowing import BorrowPolicy
from isoload.policies.plan import Plan
from isoload.policies.published.on_host import Ints, read_batch, write_batch

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
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in 0..1, got {self.alpha}")
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000, got {self.tolerance}")

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """The slots by Algorithm 1, with the quota of the same loads by Algorithm 2: one wait serves both."""
        layers = layers_of(demand, placed, placed.resident.slot_to_expert)
        slots = placed.spare_slots if self.slots is None else self.slots
        # 0.3 of 10 are 3, although the float is a little less.
        local = round(self.alpha * MILLION) * slots // MILLION
        made = []
        for layer in layers:
            borrowed = replicate(layer, slots, local)
            filled = layer.slots.copy()
            for rank, expert in borrowed:
                start, end = (rank + 1) * layer.size - slots, (rank + 1) * layer.size
                filled[start + int((filled[start:end] < 0).argmax())] = expert
            telemetry = counted(layer, filled, placed)
            made.append((filled, shard(layer._replace(slots=filled), self.tolerance), telemetry))
        shape = placed.slot_to_expert.shape
        filled, quota, telemetry = (np.stack(part) for part in zip(*made, strict=True))
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
        found = np.full((ranks, experts + 1), -1)
        rows = self.slots.reshape(ranks, -1)
        for place in reversed(range(self.size)):
            held = rows[:, place]
            column = np.where((held >= 0) & (held < experts), held, experts)
            found[np.arange(ranks), column] = np.arange(ranks) * self.size + place
        return found[:, :experts]


def layers_of(demand: Demand, placed: PlacedLayers, slots: Tensor) -> list[Layer]:
    """The batch on the host, layer by layer."""
    given = [demand.loads, slots] if demand.at_home is None else [demand.loads, slots, demand.at_home]
    loads, held, *besides = read_batch(LibraPublishedPolicy.name, *given)
    ranks, routed = placed.topology.num_ranks, placed.host.num_routed
    loads, held = loads.reshape(-1, ranks, routed), held.reshape(-1, placed.host.num_slots)
    base = besides[0].reshape(-1, ranks) if besides else np.zeros((len(loads), ranks), dtype=np.int64)
    homes = placed.host.arrays[1][:, :routed].astype(np.int64)
    homes = homes if placed.layer is None else homes[placed.layer : placed.layer + 1]
    alive = np.ones(ranks, dtype=bool)
    if placed.topology.alive is not None:
        alive = np.array(placed.topology.alive)
    return [Layer(*parts, alive) for parts in zip(loads, held, homes, base, strict=True)]


def replicate(layer: Layer, slots: int, local: int) -> list[tuple[int, int]]:
    """Algorithm 1: the (rank, expert) that are borrowed, in order.

    Args:
        slots: N, the most experts that a rank borrows, into its last slots where these are empty.
        local: L, how many of them are the rank's own choice.
    """
    loads, target, ranks = layer.loads, layer.target, len(layer.loads)
    held, owner = layer.first_slots() >= 0, layer.home // layer.size
    room = (layer.slots.reshape(ranks, -1)[:, layer.size - slots :] < 0).sum(1) * layer.alive
    borrowed = list[tuple[int, int]]()

    def duplicate(rank: int, expert: int) -> None:
        held[rank, expert] = True
        room[rank] -= 1
        borrowed.append((rank, expert))

    for rank in range(ranks):
        wanted = np.where(held[rank], 0, loads[rank])
        for expert in np.argsort(-wanted, kind="stable")[: min(local, int(room[rank]))].tolist():
            if wanted[expert]:
                duplicate(rank, expert)
    remote = np.where(held, 0, loads).sum(0)
    load = layer.base + np.where(held, loads, 0).sum(1) + np.bincount(owner, remote, ranks).astype(np.int64)
    by_home = np.argsort(layer.home)
    for _ in range((slots - local) * ranks):
        source = int(load.argmax())
        if load[source] <= target:
            break
        hottest = np.where(owner == source, remote, 0)[by_home]
        expert = int(by_home[hottest.argmax()])
        able = (room > 0) & ~held[:, expert]
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
    first, owner, each = layer.first_slots(), layer.home // layer.size, np.arange(len(layer.home))
    held = first >= 0
    copies = np.where(held, loads, 0)  # [R, E] computed on each rank
    remote = np.zeros_like(copies)  # R of the listing: those of them that may move
    remote[owner, each] = np.where(held, 0, loads).sum(0)
    copies += remote
    load = layer.base + copies.sum(1)
    limit, moved = target * (MILLION + round(tolerance * MILLION)), True
    by_home = np.argsort(layer.home)
    while moved and int(load.max()) * MILLION > limit:
        moved = False
        for source in np.argsort(-load, kind="stable")[: int((load > target).sum())].tolist():
            row = remote[source, by_home]
            for expert in by_home[np.argsort(-row, kind="stable")[: np.count_nonzero(row)]].tolist():
                able = held[:, expert].copy()
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
    quota[first[held]] = copies[held]
    return quota


def counted(layer: Layer, filled: Ints, placed: PlacedLayers) -> Ints:
    """[5] telemetry of filled slots, see :class:`isoload.ops.Spill`."""
    per_node = placed.topology.ranks_per_node or len(layer.loads)
    borrowed = np.flatnonzero((filled >= 0) & (layer.slots < 0))
    takers, givers = borrowed // layer.size, layer.home[filled[borrowed]] // layer.size
    most = [int(np.bincount(some, minlength=1).max()) for some in (takers, givers)]
    far = int((takers // per_node != givers // per_node).sum())
    return np.array([len(borrowed), *most, far, 0])
