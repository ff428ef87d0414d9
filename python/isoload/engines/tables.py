"""Engines' tables of replicas as a Placement and back, the Placement of a rebalance, and a known batch for checks.

The plug-ins test their hooks on the known batch, whose optimal split is given, before they install them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.balancing.planning import fill
from isoload.engines.settings import PLACER, TIMES
from isoload.engines.worth import NewMaps
from isoload.placement.placement import Placement
from isoload.placers import PLACERS, parse_placer, place
from isoload.times.file import Times, load
from isoload.topology import Topology
from isoload.weights.pages import resident_slots

# Of imbalance, for which `scenario` moves a layer's experts in an engine, which serves no token meanwhile: on steady
# traffic smaller gains recur at every rebalance (bench/bench_rebalance.py).
LEAST_GAIN = 0.02


class ReplicaLists(NamedTuple):
    """A placement as EPLB's callers take it: three int64 tables."""

    physical_to_logical: Tensor  # [L, P] expert in each slot
    logical_to_physical: Tensor  # [L, E, X] slots of every expert, ascending, then -1; X = most replicas
    num_replicas: Tensor  # [L, E]


def engine_topology(num_ranks: int, num_nodes: int, times: str | None = None) -> Topology:
    """Return R ranks on num_nodes nodes, or on one node if these do not divide the ranks. `times`: file of isoload
    measure, whose speeds the ranks have if they differ by 1 % or more."""
    per_node = num_ranks // num_nodes if num_ranks % num_nodes == 0 else num_ranks
    speeds = measured(times).speeds if times is not None else ()
    if times is not None and len(speeds) != num_ranks:
        raise ValueError(
            f"{TIMES.name}={times} has the speeds of {len(speeds)} ranks but the engine has {num_ranks} "
            f"expert-parallel ranks: run isoload measure on these ranks, or unset {TIMES.name}"
        )
    return Topology(num_ranks, per_node, speeds=None if times is None else measured(times).rank_speeds)


@cache
def measured(path: str) -> Times:
    return load(path)


def placement_of(
    physical_to_logical: Tensor,
    num_experts: int,
    topology: Topology,
    num_shared: int = 0,
    spare_slots: int = 0,
) -> Placement:
    """Return the Placement of an engine's map [L, P] of routed experts; the last spare slots of each rank become empty.
    With num_shared = 1 every rank has one more slot, its last, that holds the shared expert."""
    slots = physical_to_logical.cpu().to(torch.int32)
    if spare_slots:
        slots = slots.clone()
        slots.view(len(slots), topology.num_ranks, -1)[:, :, -spare_slots:] = -1
    if num_shared:
        layers, ranks = len(slots), topology.num_ranks
        shared = torch.arange(num_experts, num_experts + num_shared, dtype=torch.int32)
        per_rank = slots.view(layers, ranks, -1)
        slots = torch.cat([per_rank, shared.expand(layers, ranks, -1)], dim=2).view(layers, -1)
    return Placement(
        slots, topology, num_experts + num_shared, num_shared=num_shared, spare_slots=spare_slots
    )


def only_spare(tables: Tensor, num_experts: int, num_ranks: int, spare: int) -> Tensor:
    resident = tables.view(len(tables), num_ranks, -1)[:, :, :-spare].flatten(1)
    experts = torch.arange(num_experts).view(1, num_experts, 1)
    return (resident.unsqueeze(1) == experts).any(2).logical_not().nonzero()


def in_order(tables: Tensor, num_experts: int, topology: Topology, spare: int) -> Placement:
    """Return a placement of the same shape with the experts in order, as often as they fit; spare slots are empty."""
    per_rank = tables.shape[1] // topology.num_ranks - spare
    rows = (torch.arange(topology.num_ranks * per_rank) % num_experts).expand(len(tables), -1)
    slots = with_empty(rows, topology.num_ranks, spare)
    return Placement(slots, topology, num_experts, spare_slots=spare)


def with_empty(resident: Tensor, num_ranks: int, spare: int) -> Tensor:
    """Return [L, P] int32 from the other slots of all ranks: the last spare slots of each rank are empty."""
    per_rank = resident.int().reshape(len(resident), num_ranks, -1)
    return torch.nn.functional.pad(per_rank, (0, spare), value=-1).flatten(1)


def fill_spare_slots(placement: Placement, counts: Tensor) -> Tensor:
    """Return [L, P] the placement's experts, with replicas of hot experts, by counts [L, E], in its empty spare slots.
    The replicas may be of another node: an engine loads or rebalances them, and prefill later keeps those that it does
    not need to replace. Without them no split levels the nodes."""
    scale = min(1.0, 2**30 / max(float(counts.sum(1).max()), 1.0))
    loads = (counts.cpu().double() * scale).round().clamp(min=1).to(torch.int32)
    tables = fill(loads, placement, policy="hedge").slot_to_expert.clone()
    size = placement.slots_per_rank
    for layer, slot in (
        (tables < 0).nonzero().tolist()
    ):  # the policy wants no more: any expert that the rank lacks
        on_rank = tables[layer, slot // size * size : (slot // size + 1) * size].tolist()
        by_load = loads[layer].argsort(descending=True, stable=True).tolist()
        tables[layer, slot] = next((expert for expert in by_load if expert not in on_rank), by_load[0])
    return tables


def replica_lists(placement: Placement, holes: bool = False) -> ReplicaLists:
    table, experts = placement.slot_to_expert.long(), placement.num_experts
    absent = table < 0
    if absent.any() and not holes:
        raise ValueError("placement must fill every slot, got one that is empty")
    slots = table.masked_fill(absent, experts)  # replicas of one expert more, whose list is left out
    more = experts + int(absent.any())
    num = torch.zeros(len(slots), more, dtype=torch.int64).scatter_add_(1, slots, torch.ones_like(slots))
    lists = torch.full((len(slots), more, int(num.max())), -1)
    by_expert = slots.argsort(dim=1, stable=True)
    sorted_experts = slots.gather(1, by_expert)
    first = num.cumsum(1) - num  # position of an expert's first slot in by_expert
    column = torch.arange(slots.shape[1]) - first.gather(1, sorted_experts)
    lists[torch.arange(len(slots)).unsqueeze(1), sorted_experts, column] = by_expert
    num = num[:, :experts]
    return ReplicaLists(table, lists[:, :experts, : int(num.max())], num)


def keep_slots(slots: Tensor, before: Tensor, num_ranks: int) -> Tensor:
    """Return [L, P] the same experts on every rank; those that were on it before [L, P] keep their slots."""
    size = slots.shape[1] // num_ranks
    new, old = slots.reshape(-1, size), before.reshape(-1, size)
    result, left = torch.full_like(new, -1), torch.ones_like(new, dtype=torch.bool)
    for slot in range(new.shape[1]):
        stays = left & (new == old[:, slot : slot + 1])
        rows = stays.any(dim=1).nonzero().flatten()
        result[rows, slot] = old[rows, slot]
        left[rows, stays[rows].int().argmax(dim=1)] = False  # one of several slots of an expert
    result[result < 0] = new[left]  # the same number in every row
    return result.view_as(slots)


def arrivals(before: Tensor, after: Tensor, rank: int, num_ranks: int) -> dict[int, int]:
    """Return by layer how many distinct experts came to a rank, from tables [L, P] before and after; -1: none."""
    size = before.shape[1] // num_ranks
    old, new = (table[:, rank * size : (rank + 1) * size].tolist() for table in (before, after))
    return {i: len(set(b) - set(a) - {-1}) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}


def running(before: Tensor | None, num_slots: int, holes: bool = False) -> Tensor | None:
    """Return an engine's present map [L, P]; None if a placer cannot start from it. That is the case if P differs, as
    when ranks join or leave, or slots are empty and holes are not allowed."""
    if before is None or before.shape[1] != num_slots or (not holes and (before < 0).any()):
        return None
    return before


def lay_out(
    counts: Tensor,
    topology: Topology,
    slots_per_rank: int,
    placer: str,
    before: Tensor | None,
    new_maps: NewMaps | None = None,
    passes: int = 1,
    spare_slots: int = 0,
    holes: bool = False,
) -> ReplicaLists:
    """Place experts by a placer of the registry, from the present placement if the placer supports it.

    `counts` are [L, E] or [batches, L, E] of so many passes; `before` is :func:`running`'s. `new_maps` keeps the
    present placement if a new one does not pay. No expert is alone in the last spare_slots of a rank. With holes every
    rank keeps the number of slots that have memory in `before`.
    """
    name, options = parse_placer(placer)
    if name == "scenario":
        options = {"least_gain": LEAST_GAIN} | options
    num_experts, total = counts.shape[-1], counts if counts.dim() == 2 else counts.sum(0)
    present = None if before is None else placement_of(before, num_experts, topology)
    start = present if PLACERS[name].takes_before else None
    if start is not None and before is not None and spare_slots:
        start = placement_of(before, num_experts, topology, spare_slots=spare_slots)
    capacity = None if before is None or not holes else resident_slots(before, topology.num_ranks)
    placed = place(
        counts, topology, slots_per_rank, name, spare_slots, before=start, capacity=capacity, **options
    )
    if spare_slots:
        placed = placement_of(fill_spare_slots(placed, total), num_experts, topology)
    if new_maps is not None and present is not None:
        placed = new_maps.choose(present, placed, total.cpu(), passes)
    return replica_lists(placed, holes)


def check_placer(
    option: str,
    placer: str,
    tables: Tensor,
    num_experts: int,
    topology: Topology,
    spare_slots: int = 0,
    holes: bool = False,
) -> None:
    """Make a placement as an engine's rebalance will, so that no rebalance fails while tokens are served."""
    layers, num_slots = tables.shape
    before, size = running(tables, num_slots, holes), num_slots // topology.num_ranks
    counts = torch.ones(layers, num_experts)
    try:
        lay_out(counts, topology, size, placer, before, spare_slots=spare_slots, holes=holes)
    except ValueError as error:
        raise ValueError(f"{option} with {PLACER.name}={placer}: {error}") from None


class EngineSizes(NamedTuple):
    """Sizes that follow from an engine's options and its model's configuration."""

    num_layers: int  # as the engine numbers them
    num_experts: int  # routed experts of a layer
    num_redundant: int  # redundant experts of a layer
    num_ranks: int  # of the expert-parallel group
    option: str  # how the number of redundant experts is passed; {} is replaced by the number
    from_file: bool  # whether the user passes the map as a file

    def check(self, source: str, num_layers: int, num_slots: int) -> None:
        slots = self.num_experts + self.num_redundant
        made_of = f"{self.num_experts} experts and {self.num_redundant} redundant ones"
        if slots % self.num_ranks:
            raise ValueError(
                f"the engine has {slots} slots in each layer ({made_of}), which its {self.num_ranks} expert-parallel "
                f"ranks cannot share evenly: pass {self._redundant(-slots % self.num_ranks + self.num_redundant)}"
            )
        if num_layers != self.num_layers:
            other = "isoload place --model config.json makes a file of the model's layers"
            raise ValueError(
                f"{source} has {num_layers} layers but the model has {self.num_layers}"
                + (f": {other}" if self.from_file else "")
            )
        if num_slots == slots:
            return
        choices, redundant = [], num_slots - self.num_experts
        if redundant >= 0 and num_slots % self.num_ranks == 0:
            choices.append(self._redundant(redundant))
        if self.from_file:
            size = f"--ranks {self.num_ranks} --slots-per-rank {slots // self.num_ranks}"
            choices.append(f"a file made by isoload place {size}")
        raise ValueError(
            f"{source} has {num_slots} slots in each layer but the engine has {slots} ({made_of}) on "
            f"{self.num_ranks} expert-parallel ranks: pass {', or '.join(choices)}"
        )

    def _redundant(self, number: int) -> str:
        return self.option.replace("{}", str(number))


# A known batch: six experts on two ranks of four slots; experts 0 and 1 have a replica on each rank. All tokens choose
# expert 0, so an optimal split halves it.
SLOTS = torch.tensor([[0, 1, 2, 3, 0, 1, 4, 5]])
IDS = torch.tensor([[0, 1], [0, 2], [0, 4], [0, 1]], dtype=torch.int32)
NUM_EXPERTS, NUM_RANKS = 6, 2


def known_placement() -> Placement:
    return placement_of(SLOTS, NUM_EXPERTS, Topology(NUM_RANKS))


def known_balancer() -> Balancer:
    return Balancer(known_placement(), 0, "exact", tokens="same")


def is_right(slots: Tensor, valid: int) -> bool:
    """Return whether the valid rows of the known batch are split optimally, over slots of their experts."""
    rows = slots[:valid]
    per_rank = torch.bincount(rows.flatten().long() // 4, minlength=NUM_RANKS)
    half = -(-int(per_rank.sum()) // NUM_RANKS)
    experts = SLOTS[0][rows.long()]
    return (
        slots.dtype == IDS.dtype and torch.equal(experts.int(), IDS[:valid]) and int(per_rank.max()) == half
    )
