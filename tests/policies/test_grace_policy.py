"""Policy grace: the nearest replicas, in the proportions of their weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoload
from isoload.reference.experts import run_experts

WHOLE = 2**31 - 1


def draw(seed, layers=2):
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


def tier(placement, layer, expert, rank, locality):
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


@pytest.mark.parametrize("locality", [True, False])
def test_parts_are_those_of_the_weights_in_the_nearest_tier(locality):
    replicated = 0
    for seed in range(60):
        placement, loads = draw(seed)
        for layer in range(2):
            made = isoload.plan(loads[layer], placement, layer, "grace", locality=locality)
            rows = isoload.share(loads[layer], made)
            assert (rows >= 0).all() and torch.equal(rows.sum(0, dtype=torch.int32), made.quota)
            assert int(made.peak) == int(made.quota.view(placement.topology.num_ranks, -1).sum(1).max())
            for rank, row in enumerate(rows):
                assert torch.equal(row, isoload.share(loads[layer], made, rank))
                left = row.clone()
                for expert in range(placement.num_experts):
                    own = int(loads[layer, rank, expert])
                    held, weight = tier(placement, layer, expert, rank, locality)
                    assert int(row[held].sum()) == own
                    replicated += len(held) > 1 and own > 0
                    for slot, part in zip(held, weight, strict=True):
                        wished = own * part / sum(weight)
                        assert abs(int(row[slot]) - wished) <= 1 + own * len(held) / 2**13
                    left[held] = 0
                assert not left.any(), "a slot outside of the tier"
    assert replicated > 100


def test_layers_at_once_are_layers_one_by_one():
    placement, loads = draw(3)
    whole = isoload.plan_layers(loads, placement, "grace")
    for layer in range(2):
        assert torch.equal(whole.quota[layer], isoload.plan(loads[layer], placement, layer, "grace").quota)


def test_roundings_cancel_over_sources():
    """32 sources with one copy each for two replicas on other nodes: neither gets all of them."""
    topology = isoload.Topology(34, 1)
    slots = torch.full((1, 34), -1)
    slots[0, 32:] = 0
    placement = isoload.Placement(slots, topology, 1)
    loads = torch.ones(34, 1, dtype=torch.int32)
    loads[32:] = 0
    quota = isoload.plan(loads, placement, 0, "grace").quota[32:]
    assert quota.sum() == 32 and abs(int(quota[0]) - 16) <= 1


def test_the_layer_is_the_dense_one_and_a_new_placement_is_followed():
    topology = isoload.Topology(4, 2)
    before, after = (isoload.place(torch.rand(1, 8), topology, slots_per_rank=3) for _ in range(2))
    dense = isoload.ExpertWeights.random(8, 8, 6, dtype=torch.float64)
    router = torch.randn(8, 8, dtype=torch.float64)

    def gate(rows):
        weights, ids = (rows @ router).softmax(-1).topk(2)
        return ids, weights

    layer = isoload.MoE(gate, dense, isoload.LocalTransport(topology), before, policy="grace", weight_rows=3)
    rows = [torch.randn(n, 8, dtype=torch.float64) for n in (6, 0, 9, 2)]
    for placement in (before, after):
        if placement is after:
            layer.load_placement(after)
        for row, output in zip(rows, layer(rows), strict=True):
            wanted = run_experts(row, *gate(row), *dense.stacks().values(), None, None)
            assert torch.allclose(output, wanted, rtol=1e-12, atol=1e-12)
        loads = torch.stack([isoload.count(gate(row)[0], 8) for row in rows])
        fresh = isoload.plan(loads, placement, 0, "grace")
        assert torch.equal(layer.last_plan.quota, fresh.quota)
