"""Policy ``static``: each source rank always sends an expert to the same replica (SGLang's default)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isoload.ops import Order
from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Policy, Split, chosen_split
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class StaticPolicy(Policy):
    """A replica on the own rank, else one on the own node, else one by a fair seeded draw, until re-placement.

    Options: seed of the draw (SGLang uses 42).
    """

    name = "static"
    needs = "per_source"
    seed: int = 42

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        rows = self._all_rows(demand.loads, self.slots(placed), tables.num_slots)
        return chosen_split(rows.sum(-2, dtype=torch.int32), demand, tables, placed)

    def share(
        self,
        loads: Tensor,
        quota: Tensor,
        tables: ReplicaTables,
        placed: PlacedLayers,
        rank: int | None,
        order: Order,
    ) -> Tensor:
        slots = self.slots(placed)
        if rank is None:
            return self._all_rows(loads, slots, tables.num_slots)
        return self._all_rows(loads.select(-2, rank), slots.select(-2, rank), tables.num_slots)

    def copies(self, loads: Tensor, quota: Tensor, tables: ReplicaTables, placed: PlacedLayers) -> Tensor:
        rows = self._all_rows(loads, self.slots(placed), tables.num_slots)
        return rows.view(*rows.shape[:-1], tables.num_ranks, -1).sum(-1, dtype=torch.int32)

    @staticmethod
    def _all_rows(loads: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        """[..., P] copies per slot if every row of loads [..., E] sends expert e to slots[..., e]."""
        rows = loads.new_zeros((*loads.shape[:-1], num_slots))
        return rows.scatter_(-1, slots.expand(loads.shape), loads)

    def slots(self, placed: PlacedLayers) -> Tensor:
        """[..., R, E] int64 slot that each source rank uses for each expert; drawn once per placement."""
        if self not in placed.cache:
            layers = range(placed.host.num_layers) if placed.layer is None else [placed.layer]
            table = np.stack([static_slots(placed, layer, self.seed) for layer in layers])
            chosen = torch.tensor(table, device=placed.home_slot.device)
            placed.cache[self] = chosen if placed.layer is None else chosen.select(0, 0)
        return placed.cache[self]


def static_slots(
    placed: PlacedLayers, layer: int, seed: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[R, E] the slot each source rank uses for each routed expert of one layer."""
    host, topology = placed.host, placed.topology
    slots = host.arrays[0][layer]
    size, per_node = host.slots_per_rank, topology.ranks_per_node
    chosen = np.empty((topology.num_ranks, host.num_routed), dtype=np.int64)
    draw = np.random.default_rng((seed, layer))
    for expert in range(host.num_routed):
        replicas = np.flatnonzero(slots == expert)
        if len(replicas) == 1:
            chosen[:, expert] = replicas[0]
            continue
        far = []
        for rank in range(topology.num_ranks):
            here = replicas[replicas // size == rank]
            near = replicas[replicas // (size * per_node) == rank // per_node]
            if here.size or near.size:
                chosen[rank, expert] = (here if here.size else near)[0]
            else:
                far.append(rank)
        # Fair: every replica serves as many of the far ranks as any other, give or take one.
        rounds = -(-len(far) // len(replicas))
        turns = np.concatenate([replicas[:0], *(draw.permutation(replicas) for _ in range(rounds))])
        chosen[far, expert] = draw.permutation(turns[: len(far)])
    return chosen
