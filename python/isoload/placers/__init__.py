"""Offline placers: one file each, one registry.

A placer plans dense slots on R equal ranks; ``place`` adds spare slots and dead ranks, whatever the placer.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from isoload.placement import Placement
from isoload.placers.base import Loads, Placer
from isoload.placers.eplb import EplbPlacer
from isoload.placers.graph import GraphPlacer
from isoload.placers.trivial import TrivialPlacer
from isoload.topology import Topology

MAX_SHARED = 64  # models have one or two
MAX_SLOTS = 2**16  # of a layer: planners stay below a second

PLACERS: dict[str, type[Placer]] = {
    placer.name: placer for placer in (TrivialPlacer, EplbPlacer, GraphPlacer)
}
OLD_NAMES = {"topology": "graph"}  # still accepted


def place(
    counts: Any,
    topology: Topology,
    slots_per_rank: int | None = None,
    placer: str = "eplb",
    spare_slots: int = 0,
    num_shared: int = 0,
    **options: Any,
) -> Placement:
    """Lays experts and replicas into slots.

    Args:
        counts: [L, E] or [batches, L, E] copies per routed expert (array or tensor).
        topology: the ranks; those not alive get no expert.
        slots_per_rank: S, shared and spare slots included. Default: one slot for each expert, and those.
        placer: a name in ``isoload.PLACERS``.
        spare_slots: of every rank's S slots, how many stay empty; at most E.
        num_shared: shared experts, at most 64; every live rank holds each in a slot after its routed ones.
        **options: the placer's own, e.g. ``dedup=False``.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    placer = OLD_NAMES.get(placer, placer)
    if placer not in PLACERS:
        raise ValueError(f"placer must be one of {', '.join(PLACERS)}, got {placer!r}")
    known = [f.name for f in fields(PLACERS[placer])]
    if unknown := [key for key in options if key not in known]:
        listed = ", ".join(known) or "(none)"
        raise ValueError(f"option must be one of {listed} for placer {placer}, got {unknown[0]!r}")
    loads = _batches(counts)
    num_layers, experts = loads.shape[1:]
    live = topology.live_ranks
    for name, number, most in (("spare_slots", spare_slots, experts), ("num_shared", num_shared, MAX_SHARED)):
        if number < 0:
            raise ValueError(f"{name} must be at least 0, got {number}")
        if number > most:
            raise ValueError(f"{name} must be at most {most}, got {number}")
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
    dense = slots_per_rank - spare_slots - num_shared
    packed = PLACERS[placer](**options).place(loads, len(live), dense)
    slots = np.full((num_layers, topology.num_ranks, slots_per_rank), -1, dtype=np.int32)
    slots[:, live, :dense] = packed.reshape(num_layers, len(live), dense)
    slots[:, live, dense : dense + num_shared] = np.arange(experts, experts + num_shared)
    return Placement(
        torch.from_numpy(slots.reshape(num_layers, -1)),
        topology,
        experts + num_shared,
        spare_slots=spare_slots,
        num_shared=num_shared,
    )


def _batches(counts: Any) -> Loads:
    """[batches, L, E] float64 copies."""
    if isinstance(counts, torch.Tensor):
        counts = counts.detach().cpu().double().numpy()
    try:
        loads = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"counts must be numeric, got {type(counts).__name__} ({error})") from None
    if loads.ndim not in (2, 3) or 0 in loads.shape:
        raise ValueError(f"counts must be [L, E] or [batches, L, E] and not empty, got {list(loads.shape)}")
    if (bad := ~((loads >= 0) & (loads < 2**63))).any():
        raise ValueError(f"counts must be at least 0 and below 2^63, got {loads[bad][0]:g}")
    return loads if loads.ndim == 3 else loads[None]


__all__ = ["PLACERS", "Placer", "place"]
