"""Policy ``static``: each source rank always sends an expert to the same replica (SGLang's default)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from isoload.ops import Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import IntArray, Placement
from isoload.policies.base import Demand, Policy, check_seed, chosen_plan
from isoload.policies.plan import Plan


@dataclass(frozen=True)
class StaticPolicy(Policy):
    """A replica on the own rank, else one on the own node, else one by a fair seeded draw, until re-placement.

    Options: seed of the draw (SGLang uses 42).
    """

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
        """[..., R, P] copies per slot where source r sends expert e to slots[..., r, e], or [..., P] of one rank."""
        slots = self.slots(placed)
        if rank is not None:
            loads, slots = loads.select(-2, rank), slots.select(-2, rank)
        send_counts = loads.new_zeros((*loads.shape[:-1], placed.host.num_slots))
        return send_counts.scatter_(-1, slots.expand(loads.shape), loads)

    def slots(self, placed: PlacedLayers) -> Tensor:
        """[..., R, E] int64 slot that each source rank uses for each expert; drawn once per placement."""
        return placed.memo(self, partial(static_slots, seed=self.seed))


def static_slots(host: Placement, layer: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[R, E] the slot each source rank uses for each routed expert of one layer."""
    topology, size = host.topology, host.slots_per_rank
    per_node = size * topology.ranks_per_node
    chosen = np.empty((topology.num_ranks, host.num_routed), dtype=np.int64)
    draw = np.random.default_rng((seed, layer))
    for expert, replicas in enumerate(replicas_of(host, layer)):
        if len(replicas) == 1:
            chosen[:, expert] = replicas[0]
            continue
        slots = np.full(topology.num_ranks, -1, dtype=np.int64)
        for near in replicas[::-1]:  # the lowest of a node's replicas last, so that it remains
            first = near // per_node * topology.ranks_per_node
            slots[first : first + topology.ranks_per_node] = near
        slots[replicas // size] = replicas
        chosen[:, expert] = slots
        far = np.flatnonzero(slots < 0)
        # Fair: every replica serves as many of the far ranks as any other, give or take one.
        rounds = -(-len(far) // len(replicas))
        turns = np.concatenate([replicas[:0], *(draw.permutation(replicas) for _ in range(rounds))])
        chosen[far, expert] = draw.permutation(turns[: len(far)])
    return chosen


def replicas_of(host: Placement, layer: int) -> list[IntArray]:
    """Per routed expert its slots, ascending; of two on one rank the lower alone, since only that one has weights."""
    slots = host.arrays[0][layer]
    held = [np.flatnonzero(slots == expert).astype(np.int32) for expert in range(host.num_routed)]
    return [own[np.unique(own // host.slots_per_rank, return_index=True)[1]] for own in held]
