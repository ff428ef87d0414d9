"""Placers ``eplb`` (DeepSeek's EPLB, github.com/deepseek-ai/EPLB) and ``trivial`` (experts in order)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isoload.placers.base import LiveRanks, Placed, Placer, Scenarios, Slots, slots_of
from isoload.placers.compiled import num_threads, pack_slots

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class EplbPlacer(Placer):
    """One replica of every expert, the rest where replicas are heaviest; packed the heaviest first.

    Plans for the loads summed over batches. Slots of a rank are in the order in which they were filled.

    Options:
        dedup: never two replicas of one expert on one rank, so at most R replicas of each. False gives the
            published maps exactly (where experts tie: those of the published code under a stable sort).
        groups: of experts, consecutive ones, of which a token chooses some. If nodes divide them this is the
            hierarchical policy: groups are packed onto nodes, each node's experts replicated and packed there. 0 or
            any other number means the global policy, as published.

    Raises:
        ValueError: with ``dedup``, if a rank has more slots than there are experts (hierarchical: on its node); groups
            that do not divide the experts, or nodes with unequal numbers of live ranks.
    """

    name = "eplb"
    dedup: bool = True
    groups: int = 0

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        # float32 from here on, because the published code is: other roundings break its near-ties otherwise.
        weight = scenarios.total().astype(np.float32)
        experts = scenarios.num_experts
        if self.groups and (self.groups < 0 or experts % self.groups):
            raise ValueError(f"groups must divide the {experts} experts, got {self.groups}")
        nodes = len(set(live_ranks.node.tolist()))
        if not self.groups or nodes == 1 or self.groups % nodes:
            return Placed(pack_replicas(weight, live_ranks.num_ranks, slots_of(live_ranks), self.dedup))
        ranks = np.bincount(live_ranks.node)
        if len(set(ranks[ranks > 0].tolist())) > 1:
            raise ValueError(
                f"groups must be 0 where nodes have unequal numbers of live ranks, got {self.groups}"
            )
        return Placed(self._place_by_node(weight, nodes, live_ranks))

    def _place_by_node(self, weight: Floats, nodes: int, live_ranks: LiveRanks) -> Slots:
        """The hierarchical policy: [L, R, S] slots."""
        layers, size = len(weight), weight.shape[1] // self.groups
        by_group = weight.reshape(layers, self.groups, size).sum(-1, dtype=np.float32)
        groups_of_node = pack_once(by_group, nodes)  # [L, nodes, groups of a node]
        ids = (groups_of_node[..., None] * size + np.arange(size)).reshape(
            layers * nodes, -1
        )  # experts of every node
        node_weight = np.take_along_axis(np.repeat(weight, nodes, axis=0), ids, 1)
        packed = pack_replicas(node_weight, live_ranks.num_ranks // nodes, slots_of(live_ranks), self.dedup)
        slots = np.take_along_axis(ids, packed.reshape(layers * nodes, -1), 1)
        return slots.reshape(layers, live_ranks.num_ranks, -1).astype(np.int32)


def pack_replicas(weight: Floats, ranks: int, slots: int, dedup: bool) -> Slots:
    """[L, R, S] experts, from loads [L, E] float32."""
    layers, experts = weight.shape
    if dedup and slots > experts:
        raise ValueError(
            f"slots_per_rank must be at most {experts} besides spare slots, one for each expert "
            f"(dedup=False repeats experts), got {slots}"
        )
    return pack_into(weight, np.full((layers, ranks), slots, dtype=np.int32), dedup)


def pack_into(weight: Floats, capacity: Slots, dedup: bool = True) -> Slots:
    """[L, R, S] experts, from loads [L, E] float32 and slots of every rank [L, R]; S is the largest, -1 = absent."""
    return pack_slots(weight, capacity, dedup, num_threads())


def pack_once(weight: Floats, packs: int) -> Slots:
    """[L, packs, n] items, each once and n in a pack, from weights [L, items] float32.

    One item per pack is not sorted by weight but lies in order, as published.
    """
    layers, items = weight.shape
    if items == packs:
        return np.tile(np.arange(items, dtype=np.int32)[:, None], (layers, 1, 1))
    return pack_replicas(weight, packs, items // packs, dedup=True)


@dataclass(frozen=True)
class TrivialPlacer(Placer):
    """Slot p holds expert p mod E: in order, S per rank; slots left over hold replicas, from expert 0 on."""

    name = "trivial"

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        shape = (live_ranks.num_ranks, slots_of(live_ranks))
        row = np.arange(shape[0] * shape[1], dtype=np.int32) % scenarios.num_experts
        return Placed(np.tile(row.reshape(shape), (scenarios.num_layers, 1, 1)))
