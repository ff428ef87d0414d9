"""Placements and loads for the policies of GRACE-MoE, and which slots a source may use, counted slot by slot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import isoload

WHOLE = 2**31 - 1


def draw(seed: int, layers: int = 2) -> tuple[isoload.Placement, Tensor]:
    """A placement with replicas, ragged, with dead ranks, weights and nodes, and loads [L, R, E]."""
    rng = np.random.default_rng(seed)
    per_node, nodes = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    ranks, experts = per_node * nodes, int(rng.integers(2, 9))
    alive = [True] * ranks
    if ranks > 2 and rng.random() < 0.4:
        alive[int(rng.integers(ranks))] = False
    topology = isoload.Topology(ranks, per_node, alive=tuple(alive))
    live = topology.live_ranks
    size = -(-experts // len(live)) + int(rng.integers(0, 3))
    slots = np.full((layers, ranks, size), -1)
    for layer in range(layers):
        places = [(r, i) for r in live for i in range(size)]
        rng.shuffle(places)
        for i, (rank, place) in enumerate(places):
            expert = i if i < experts else int(rng.integers(-1, experts))
            slots[layer, rank, place] = expert
    weight = (
        torch.from_numpy(rng.random((layers, ranks * size)).astype(np.float32))
        if rng.random() < 0.7
        else None
    )
    if weight is not None and rng.random() < 0.3:
        weight[0] = 0  # no wish
    flat = torch.from_numpy(slots.reshape(layers, -1))
    placement = isoload.Placement(flat, topology, experts, replica_weight=weight)
    most = WHOLE // (ranks * experts) if rng.random() < 0.3 else 50
    loads = rng.integers(0, most + 1, (layers, ranks, experts)) * (rng.random((layers, ranks, experts)) < 0.8)
    loads[:, [r for r in range(ranks) if r not in live]] = 0
    return placement, torch.from_numpy(loads).to(torch.int32)


def tier(
    placement: isoload.Placement, layer: int, expert: int, rank: int, locality: bool
) -> tuple[list[int], list[float]]:
    """The slots that a source may use, and the weight of each."""
    size, per_node = placement.slots_per_rank, placement.topology.ranks_per_node
    held, seen = [], set()
    for slot, e in enumerate(placement.arrays[0][layer].tolist()):
        if e == expert and slot // size not in seen:
            seen.add(slot // size)
            held.append(slot)
    for near in (
        [p for p in held if p // size == rank],
        [p for p in held if p // size // per_node == rank // per_node],
    ):
        if near and locality:
            held = near
            break
    weight = [
        1.0 if placement.replica_weight is None else float(placement.replica_weight[layer, p]) for p in held
    ]
    return held, (weight if any(weight) else [1.0] * len(held))
