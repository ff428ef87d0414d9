"""Offline placers and their registry, with one file for each placer.

A placer assigns routed experts to the live ranks; ``place`` adds spare slots, shared experts and dead ranks.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from isoload.checks import make, parse
from isoload.placement.placement import Placement
from isoload.placers.base import (
    Ints,
    LiveRanks,
    Placed,
    Placer,
    Scenarios,
    Slots,
    make_scenarios,
    merged,
    weights_by_load,
)
from isoload.placers.craft import CraftPlacer
from isoload.placers.eplb import EplbPlacer, TrivialPlacer
from isoload.placers.grace import GracePlacer
from isoload.placers.resize import filled_up, resized
from isoload.placers.scenario import ScenarioPlacer
from isoload.topology import NOMINAL_TICKS, Topology, as_topology
from isoload.traces.identity import joined

MAX_SHARED = 64  # models have one or two
MAX_SLOTS = 2**16  # of a layer: planners stay below a second

PLACERS: dict[str, type[Placer]] = {
    placer.name: placer for placer in (TrivialPlacer, EplbPlacer, CraftPlacer, ScenarioPlacer, GracePlacer)
}


def register_placer(placer: type[Placer]) -> type[Placer]:
    """Register a placer under its name, which must be new; usable as a decorator."""
    if placer.name in PLACERS:
        raise ValueError(f"name must be a new one, placer {placer.name} exists")
    PLACERS[placer.name] = placer
    return placer


def place(
    counts: Any,
    topology: Topology | int,
    slots_per_rank: int | None = None,
    placer: str = "eplb",
    spare_slots: int = 0,
    num_shared: int = 0,
    before: Placement | None = None,
    capacity: Any = None,
    **options: Any,
) -> Placement:
    """Return a placement: the expert or replica in each slot.

    Args:
        counts: [L, E] or [batches, L, E] copies per routed expert (array or tensor); or one or several
            :class:`isoload.traces.Trace`, whose layer_ids the placement then has.
        topology: the ranks, or their number R; ranks that are not alive get no expert.
        slots_per_rank: S, shared and spare slots included. Default: one slot for each expert, plus shared and spare
            slots.
        placer: a name in ``isoload.PLACERS``.
        spare_slots: number of slots of every rank that stay empty, at most E.
        num_shared: number of shared experts, at most 64; every live rank has a slot for each, after its routed slots.
        before: a placement of the same experts, from which placer ``scenario`` can start. A trace's layer_ids select
            its layers; an array of counts has all of its layers, in order. If the number of ranks or slots differs,
            rank r stays rank r, ranks leave or join at the end, and the remaining ranks keep as many copies as
            possible.
        capacity: [L, R] slots for routed experts that have memory on each rank in each layer; the other slots stay
            absent. Placers eplb, craft and scenario keep to these, and with a budget of replicas move slots between
            layers. None: no such bound.
        **options: the placer's own, e.g. ``dedup=False``.
    """
    planner, topology = make_placer(placer, options), as_topology(topology)
    scenarios, traces = make_scenarios(counts)
    live = topology.live_ranks
    dense = _dense_slots(scenarios, topology, slots_per_rank, spare_slots, num_shared)
    others, ticks = spare_slots + num_shared, topology.ticks
    tick = np.ones(len(live)) if ticks is None else ticks.numpy()[live] / NOMINAL_TICKS
    capacities = _check_capacity(capacity, planner, scenarios, topology, dense)
    start: Slots | None = None
    home_rank: Ints | None = None
    if before is not None:
        if not planner.takes_before:
            raise ValueError(f"before must be None for placer {planner.name}, which places from scratch")
        if traces:
            before = before.for_trace(traces[0], "before")
        _check_before(before, scenarios, spare_slots, num_shared)
        routed_slots = before.slots_per_rank - spare_slots - num_shared  # for routed experts
        per_rank = before.arrays[0].reshape(before.num_layers, before.topology.num_ranks, -1)
        rows = merged(per_rank[:, :, :routed_slots])
        same_ranks = before.topology.num_ranks == topology.num_ranks
        if same_ranks and (routed_slots == dense or planner.has_budget or capacities is not None):
            start = rows[:, live]  # only the first of two slots of an expert on a rank
        else:
            start = resized(rows, live, dense, scenarios.mean(scenarios.loads), tick)
        home_rank = _home_ranks(before, live, topology.num_ranks)
        on_home = np.take_along_axis(start, home_rank[:, :, None], 1)  # [L, E, S] experts
        # With fewer slots, a rank may have dropped an expert whose home it was.
        present = (on_home == np.arange(scenarios.num_experts)[:, None]).any(2)
        home_rank = np.where(present, home_rank, -1).astype(np.int32)
    live_ranks = LiveRanks(
        node=np.array(live, dtype=np.int32) // topology.ranks_per_node,
        tick=tick,
        slots_per_rank=None if planner.has_budget and slots_per_rank is None else dense,
        before=start,
        home_rank=home_rank,
        capacity=capacities,
    )
    identity = None if before is None else before.identity
    if traces:  # all traces are of one model; some may state more about it than the first
        identity = traces[0].identity
        for trace in traces[1:]:
            identity = joined(identity, trace.identity, f"trace {traces[0].name}", f"trace {trace.name}")
    placed = planner.place(scenarios, live_ranks)
    width, ragged = placed.slots.shape[2], planner.has_budget or capacities is not None
    if live_ranks.slots_per_rank is None:
        dense = width
    slots = np.full((scenarios.num_layers, topology.num_ranks, dense + others), -1, dtype=np.int32)
    slots[:, live, :width] = placed.slots if start is None else keep_places(placed.slots, start, ragged)
    weight = np.zeros(slots.shape, dtype=np.float32)
    if placed.replica_weight is None:
        weight[:, live] = weights_by_load(slots[:, live], scenarios.mean(scenarios.loads), live_ranks.tick)
    else:
        weight[:, live, :width] = placed.replica_weight
    experts = scenarios.num_experts
    slots[:, live, dense : dense + num_shared] = np.arange(experts, experts + num_shared)
    return Placement(
        torch.from_numpy(slots.reshape(scenarios.num_layers, -1)),
        topology,
        experts + num_shared,
        home_slot=_home_slots(slots, placed.home_rank, live, before, experts + num_shared),  # type: ignore[arg-type]
        spare_slots=spare_slots,
        num_shared=num_shared,
        layer_ids=traces[0].layer_ids if traces else () if before is None else before.layer_ids,
        identity=identity,  # type: ignore[arg-type]
        replica_weight=torch.from_numpy(weight.reshape(scenarios.num_layers, -1)),
        provenance={
            "placer": planner.name,
            "options": asdict(planner),
            "traces": [trace.name for trace in traces],
            "scenarios": len(scenarios.loads),
            **placed.notes,
        },
    )


def rectangle(placement: Placement, counts: Any) -> Placement:
    """Return a placement with replicas in its absent slots, each where it helps most; all other slots stay. The
    placement has live ranks, no spare slots and no shared experts. `counts` as for :func:`place`."""
    scenarios, _ = make_scenarios(counts)
    layers, ranks = placement.num_layers, placement.topology.num_ranks
    ticks = placement.topology.ticks
    tick = np.ones(ranks) if ticks is None else ticks.numpy() / NOMINAL_TICKS
    loads = scenarios.mean(scenarios.loads)
    slots = filled_up(placement.arrays[0].reshape(layers, ranks, -1), loads, tick)
    weight = torch.from_numpy(weights_by_load(slots, loads, tick).reshape(layers, -1))
    return replace(
        placement, slot_to_expert=torch.from_numpy(slots.reshape(layers, -1)), replica_weight=weight
    )


def make_placer(name: str, options: dict[str, Any]) -> Placer:
    return make("placer", PLACERS, name, options)


def parse_placer(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options from a text ``name`` or ``name:option=value:option=value``."""
    return parse("placer", PLACERS, text)


def keep_places(slots: Slots, before: Slots, ragged: bool) -> Slots:
    """Return slots [L, R, S] reordered so that every expert that stays on its rank keeps its slot in ``before``. If the
    placement is ragged, absent slots come last, so an expert leaves a slot that is absent now."""
    width = slots.shape[2]
    ordered, start = np.full_like(slots, -1), np.full_like(slots, -1)
    start[:, :, : before.shape[2]] = before[:, :, :width]
    rows = (array.reshape(-1, width) for array in (ordered, start, slots))
    for row, old, new in zip(*rows, strict=True):
        stays = (old >= 0) & np.isin(old, new)
        if ragged:
            stays &= np.arange(width) < (new >= 0).sum()
        row[stays] = old[stays]
        come = new[(new >= 0) & ~np.isin(new, row)]
        row[np.flatnonzero(~stays)[: len(come)]] = come
    return ordered


def _check_capacity(
    capacity: Any, planner: Placer, scenarios: Scenarios, topology: Topology, dense: int
) -> Ints | None:
    if capacity is None:
        return None
    if not planner.takes_capacity:
        raise ValueError(f"capacity must be None for placer {planner.name}, which fills every slot")
    slots, shape = np.asarray(capacity, dtype=np.int32), (scenarios.num_layers, topology.num_ranks)
    if slots.shape != shape:
        raise ValueError(
            f"capacity must be {list(shape)} for these counts and ranks, got {list(slots.shape)}"
        )
    live: Ints = slots[:, topology.live_ranks]
    if live.min() < 0 or live.max() > dense:
        raise ValueError(f"capacity must be in 0..{dense} on every rank, got {live.min()}..{live.max()}")
    if (short := live.sum(1) < scenarios.num_experts).any():
        layer = int(short.argmax())
        raise ValueError(
            f"capacity must have a slot for each of the {scenarios.num_experts} experts, got {live[layer].sum()} "
            f"in layer {layer}"
        )
    return live


def _dense_slots(
    scenarios: Scenarios, topology: Topology, slots_per_rank: int | None, spare_slots: int, num_shared: int
) -> int:
    experts, live = scenarios.num_experts, topology.live_ranks
    for name, number, limit in (
        ("spare_slots", spare_slots, experts),
        ("num_shared", num_shared, MAX_SHARED),
    ):
        if number < 0:
            raise ValueError(f"{name} must be at least 0, got {number}")
        if number > limit:
            raise ValueError(f"{name} must be at most {limit}, got {number}")
    least = -(-experts // len(live)) + spare_slots + num_shared
    if slots_per_rank is None:
        slots_per_rank = least
    if slots_per_rank < least:
        raise ValueError(
            f"slots_per_rank must be at least {least} for {experts} experts on {len(live)} live ranks "
            f"with {spare_slots} spare and {num_shared} shared slots, got {slots_per_rank}"
        )
    if slots_per_rank * topology.num_ranks > MAX_SLOTS:
        raise ValueError(
            f"slots_per_rank must be at most {MAX_SLOTS // topology.num_ranks} ({MAX_SLOTS} slots on all of "
            f"{topology.num_ranks} ranks), got {slots_per_rank}"
        )
    return slots_per_rank - spare_slots - num_shared


def _check_before(before: Placement, scenarios: Scenarios, spare_slots: int, num_shared: int) -> None:
    wanted = {
        "layers": (before.num_layers, scenarios.num_layers),
        "routed experts": (before.num_routed, scenarios.num_experts),
        "spare slots": (before.spare_slots, spare_slots),
        "shared experts": (before.num_shared, num_shared),
    }
    for name, (has, needed) in wanted.items():
        if has != needed:
            raise ValueError(f"before must have {needed} {name}, got {has}")


def _home_ranks(before: Placement, live: list[int], num_ranks: int) -> Ints:
    """Return [L, E] each routed expert's home as an index into the live ranks; -1 if the rank is dead or has left."""
    position = np.full(max(before.topology.num_ranks, num_ranks), -1, dtype=np.int32)
    position[live] = np.arange(len(live))
    homes: Ints = position[before.arrays[1][:, : before.num_routed] // before.slots_per_rank]
    return homes


def _home_slots(
    slots: Slots, home_rank: Ints | None, live: list[int], before: Placement | None, num_experts: int
) -> torch.Tensor | None:
    """Return [L, E] home slots from the home ranks [L, routed] that a placer fixed; None if it fixed none. The home of
    a shared expert is its home in ``before``, or else the first live rank."""
    if home_rank is None:
        return None
    size = slots.shape[2]
    owner = np.full((len(slots), num_experts), live[0])
    owner[:, : home_rank.shape[1]] = np.array(live)[home_rank]
    if before is not None:
        owner[:, home_rank.shape[1] :] = before.arrays[1][:, home_rank.shape[1] :] // before.slots_per_rank
    if len(dead := np.setdiff1d(owner, live)):
        raise ValueError(
            f"before must have pinned homes on live ranks, the home of a shared expert is on rank {dead[0]}"
        )
    rows = np.take_along_axis(slots, owner[:, :, None], axis=1)  # [L, E, S] experts on the rank of the home
    place = (rows == np.arange(num_experts)[:, None]).argmax(2)
    return torch.from_numpy((owner * size + place).astype(np.int32))


__all__ = [
    "PLACERS",
    "LiveRanks",
    "Placed",
    "Placer",
    "Scenarios",
    "make_placer",
    "parse_placer",
    "place",
    "rectangle",
    "register_placer",
]
