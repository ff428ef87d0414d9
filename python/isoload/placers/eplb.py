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
    """DeepSeek's EPLB: each further slot goes to the expert with the most load per replica; largest are packed first.

    The loads are summed over batches. dedup=False reproduces the published maps exactly (for equal loads: those of the
    published code with a stable sort). If the number of nodes divides groups, groups are packed onto nodes, and each
    node's experts are replicated and packed on that node (the hierarchical policy).
    """

    name = "eplb"
    takes_capacity = True
    dedup: bool = True  # never two replicas of an expert on one rank
    groups: int = 0  # of consecutive experts, from which a token's router selects some
    replicas: int | None = None  # per rank over all layers; None: the same number in every layer

    @property
    def has_budget(self) -> bool:  # type: ignore[override]
        return self.replicas is not None

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        # float32 from here on, as in the published code, whose near-ties depend on the rounding.
        weight = scenarios.total().astype(np.float32)
        experts = scenarios.num_experts
        if self.groups and (self.groups < 0 or experts % self.groups):
            raise ValueError(f"groups must divide the {experts} experts, got {self.groups}")
        if self.replicas is not None or live_ranks.capacity is not None:
            return Placed(self._place_ragged(weight, live_ranks))
        nodes = len(set(live_ranks.node.tolist()))
        if not self.groups or nodes == 1 or self.groups % nodes:
            return Placed(pack_replicas(weight, live_ranks.num_ranks, slots_of(live_ranks), self.dedup))
        ranks = np.bincount(live_ranks.node)
        if len(set(ranks[ranks > 0].tolist())) > 1:
            raise ValueError(
                f"groups must be 0 where nodes have unequal numbers of live ranks, got {self.groups}"
            )
        return Placed(self._place_by_node(weight, nodes, live_ranks))

    def _place_ragged(self, weight: Floats, live_ranks: LiveRanks) -> Slots:
        from isoload.placers.craft import budget_capacity, check_budget  # which imports this module

        if self.groups or not self.dedup:
            raise ValueError(
                "groups must be 0 and dedup True with replicas and where slots differ between layers, got "
                f"groups={self.groups} and dedup={self.dedup}"
            )
        capacity = live_ranks.capacity
        if self.replicas is not None:
            layers, experts = weight.shape
            check_budget(self.replicas, layers, live_ranks, experts)
            counts = hottest_layers(weight, self.replicas, live_ranks.num_ranks)
            capacity = budget_capacity(counts, live_ranks, experts)
        assert capacity is not None
        return pack_into(weight, capacity)

    def _place_by_node(self, weight: Floats, nodes: int, live_ranks: LiveRanks) -> Slots:
        layers, size = len(weight), weight.shape[1] // self.groups
        by_group = weight.reshape(layers, self.groups, size).sum(-1, dtype=np.float32)
        groups_of_node = pack_once(by_group, nodes)  # [L, nodes, groups of a node]
        experts = groups_of_node[..., None] * size + np.arange(size)
        ids = experts.reshape(layers * nodes, -1)  # experts of every node
        node_weight = np.take_along_axis(np.repeat(weight, nodes, axis=0), ids, 1)
        packed = pack_replicas(node_weight, live_ranks.num_ranks // nodes, slots_of(live_ranks), self.dedup)
        slots = np.take_along_axis(ids, packed.reshape(layers * nodes, -1), 1)
        return slots.reshape(layers, live_ranks.num_ranks, -1).astype(np.int32)


def hottest_layers(weight: Floats, replicas: int, ranks: int) -> Slots:
    """Return [L] replicas: R * replicas of them, each for the expert of the most load per replica of all layers. A
    layer gets at most R, and an expert at most one on each rank."""
    share = weight / np.maximum(weight.sum(1, keepdims=True), np.finfo(np.float32).tiny)
    copies, counts = np.ones(weight.shape), np.zeros(len(weight), dtype=np.int32)
    for _ in range(ranks * replicas):
        free = (counts < ranks)[:, None] & (copies < ranks)
        layer, expert = np.unravel_index(int(np.where(free, share / copies, -1.0).argmax()), weight.shape)
        copies[layer, expert] += 1
        counts[layer] += 1
    return counts


def pack_replicas(weight: Floats, ranks: int, slots: int, dedup: bool) -> Slots:
    layers, experts = weight.shape
    if dedup and slots > experts:
        raise ValueError(
            f"slots_per_rank must be at most {experts} without spare slots, one for each expert "
            f"(dedup=False repeats experts), got {slots}"
        )
    return pack_into(weight, np.full((layers, ranks), slots, dtype=np.int32), dedup)


def pack_into(weight: Floats, capacity: Slots, dedup: bool = True) -> Slots:
    """Return [L, R, S] experts, -1 = absent, from loads [L, E] float32 and slots of every rank [L, R]."""
    return pack_slots(weight, capacity, dedup, num_threads())


def pack_once(weight: Floats, packs: int) -> Slots:
    """Return [L, packs, n] items, each once and n in a pack, from weights [L, items] float32. One item per pack is kept
    in order instead of sorted by weight, as published."""
    layers, items = weight.shape
    if items == packs:
        return np.tile(np.arange(items, dtype=np.int32)[:, None], (layers, 1, 1))
    return pack_replicas(weight, packs, items // packs, dedup=True)


@dataclass(frozen=True)
class TrivialPlacer(Placer):
    """Experts in order: slot p holds expert p mod E, so the last slots are replicas from expert 0 on."""

    name = "trivial"

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        shape = (live_ranks.num_ranks, slots_of(live_ranks))
        row = np.arange(shape[0] * shape[1], dtype=np.int32) % scenarios.num_experts
        return Placed(np.tile(row.reshape(shape), (scenarios.num_layers, 1, 1)))
