"""Policy grace: the nearest replicas, in the proportions of their weights."""

from __future__ import annotations

import pytest
import torch

import isoload
from reference.experts import run_experts
from support.grace_cases import draw, tier


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
    whole = isoload.balancing.planning.plan_layers(loads, placement, "grace")
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
