"""Policy ``grace``: the nearest replicas, weighted by the placement (GRACE-MoE, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.ops import Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import IntArray, Placement
from isoload.policies.base import Demand, Policy, chosen_plan
from isoload.policies.exact import replicas_of
from isoload.policies.plan import Plan

UNITS = 2**14  # sum of an expert's weights over the replicas that a rank may choose from
ONE = 2**16  # fixed point of the cuts between a rank's copies: copies * weights * ONE stays below 2^63
GOLDEN, TURN = 0x9E37, 0x5EB9  # 0.618.. and 0.37 of ONE
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class GracePolicy(Policy):
    """A replica on the own rank, else those on the own node, else all; copies are divided by the replicas' weights.

    The weights are the placement's ``replica_weight``; equal if there are none. The published rule draws every copy at
    random. Here a rank cuts its copies at an offset of its own, so that roundings of different ranks cancel.
    locality=False divides by weights alone (Algorithm 4; otherwise Algorithm 5).
    """

    name = "grace"
    needs = "per_source"
    locality: bool = True

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        send_counts = self._send_counts(demand.loads, placed, self.cuts(placed))
        return chosen_plan(self, send_counts.sum(-2, dtype=torch.int32), demand, placed)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        placed, cuts = plan.placed, self.cuts(plan.placed)
        if rank is None:
            return self._send_counts(loads, placed, cuts)
        return self._send_counts(loads.narrow(-2, rank, 1), placed, cuts.narrow(-2, rank, 1)).squeeze(-2)

    def cuts(self, placed: PlacedLayers) -> Tensor:
        """Return [..., 4, R, P] int64 per source and slot: begin and end of its weights, their sum, and the offset."""
        return placed.memo(self, partial(weighted_cuts, locality=self.locality))

    def _send_counts(self, loads: Tensor, placed: PlacedLayers, cuts: Tensor) -> Tensor:
        """Return the [..., R, P] int32 copies from every source to every slot, for loads [..., R, E]."""
        begin, end, total, offset = cuts.unbind(-3)
        expert = placed.slot_to_expert.clamp(0, loads.shape[-1] - 1).long().unsqueeze(-2).expand(begin.shape)
        copies = loads.long().gather(-1, expert) * ONE
        whole, offset = total * ONE, offset * total
        send_counts = (copies * end + offset) // whole - (copies * begin + offset) // whole
        return send_counts.to(torch.int32)


def weighted_cuts(
    host: Placement, layer: int, locality: bool
) -> np.ndarray[tuple[int, int, int], np.dtype[np.int64]]:
    """Return [4, R, P] of one layer, see :meth:`GracePolicy.cuts`; begin equals end for an unused slot."""
    ranks = np.arange(host.topology.num_ranks)[:, None]
    cuts = np.zeros((4, len(ranks), host.num_slots), dtype=np.int64)
    cuts[2] = 1
    for expert, (slots, parts) in enumerate(wished_parts(host, layer, locality)):
        units = np.rint(parts * UNITS).astype(np.int64)
        ends = units.cumsum(1)
        cuts[0][:, slots], cuts[1][:, slots], cuts[2][:, slots] = ends - units, ends, ends[:, -1:]
        cuts[3][:, slots] = (ONE // 2 + ranks * GOLDEN + expert * TURN) % ONE
    return cuts


def wished_parts(host: Placement, layer: int, locality: bool) -> Iterator[tuple[IntArray, Floats]]:
    """Yield for every routed expert its slots [n] and the fractions [R, n] of each source's copies for these slots.
    Slots outside the nearest tier get 0; if no slot of the tier has a weight, all have the same."""
    ranks = np.arange(host.topology.num_ranks)[:, None]
    for slots in replicas_of(host, layer):
        used: Bools = np.ones((len(ranks), len(slots)), dtype=bool)
        if locality:
            used = nearest(slots // host.slots_per_rank, ranks, host.topology.ranks_per_node)
        weight = used * (1.0 if host.weight_array is None else host.weight_array[layer, slots])
        weight = np.where(weight.any(1, keepdims=True), weight, used)
        yield slots, weight / weight.sum(1, keepdims=True)


def nearest(owner: Ints, ranks: Ints, per_node: int) -> Bools:
    """Return [R, n]: which replicas, on ranks owner [n], are on a rank [R, 1] or, if none is, on its node, or any."""
    local, near = owner == ranks, owner // per_node == ranks // per_node
    beyond: Bools = np.where(near.any(1, keepdims=True), near, True)
    chosen: Bools = np.where(local.any(1, keepdims=True), local, beyond)
    return chosen
