"""Placer scenario with pinned homes: replicas in the room left, for layers whose homes lie in memory of others."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload.online import Rebalancer, Recorder
from isoload.placers import scenario
from isoload.placers.base import make_scenarios
from isoload.placers.scenario import ScenarioPlacer
from isoload.weights.experts import ExpertWeights
from reference.experts import run_experts
from reference.place_scenario import place_scenario
from support.placing import busiest, live_ranks_of

EXPERTS, HIDDEN, INNER = 12, 8, 6


def skewed(seed, batches=4, layers=2, experts=EXPERTS):
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=(1, layers, experts)), rng.normal(size=(batches, layers, experts))
    return np.floor(100 * 3.0 ** (common + own))


def pinned(counts, ranks, slots, **options):
    return isoload.place(counts, isoload.Topology(ranks), slots, "scenario", pinned=True, **options)


@pytest.mark.parametrize("split", ["even", "exact"])
@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(12, 4, 5), (10, 4, 3), (7, 3, 5), (9, 1, 9), (5, 4, 2)]
)
def test_experts_lie_in_order_and_replicas_in_the_room_left(experts, ranks, slots, split):
    placement = pinned(skewed(1, experts=experts), ranks, slots, split=split)
    rows = placement.arrays[0].reshape(2, ranks, slots)
    size = -(-experts // ranks)
    for layer, rank in np.ndindex(2, ranks):
        homes = list(range(rank * size, min((rank + 1) * size, experts)))
        assert rows[layer, rank, : len(homes)].tolist() == homes == placement.home_experts(layer, rank)
        replicas = rows[layer, rank, len(homes) :]
        replicas = replicas[replicas >= 0].tolist()
        assert replicas == sorted(set(replicas) - set(homes))


def test_homes_are_named_where_a_replica_lies_lower():
    placement = pinned(skewed(1), 4, 5)
    lowest = (placement.slot_to_expert[:, None] == torch.arange(EXPERTS)[:, None]).int().argmax(2)
    assert (placement.home_slot != lowest).any()


def test_replicas_level_the_ranks():
    counts = skewed(2)
    shares = counts / counts.sum(-1, keepdims=True)
    alone, more = (
        busiest(pinned(counts, 4, slots, shrink=0.0).arrays[0], shares, 4).mean() for slots in (3, 5)
    )
    assert more < 0.85 * alone


@pytest.mark.parametrize("split", ["even", "exact"])
@pytest.mark.parametrize("seed", range(4))
def test_compiled_loops_and_numpy_give_the_same_slots(seed, split, monkeypatch):
    scenarios, _ = make_scenarios(skewed(seed))
    placer, room = ScenarioPlacer(split, pinned=True), live_ranks_of(4, 4 + seed % 2)
    first = placer.place(scenarios, room)
    later, _ = make_scenarios(skewed(seed + 50))
    room = replace(room, before=first.slots, home_rank=first.home_rank)
    mover = replace(placer, moves=3)
    fast = [first.slots, mover.place(later, room).slots]
    monkeypatch.setattr(scenario, "search_slots", place_scenario)
    plain = [placer.place(scenarios, replace(room, before=None, home_rank=None)), mover.place(later, room)]
    for slots, found in zip(fast, plain, strict=True):
        np.testing.assert_array_equal(slots, found.slots)


def test_homes_before_stay_wherever_they_are():
    rng = np.random.default_rng(3)
    slots = np.stack([rng.permutation(EXPERTS) for _ in range(2)]).reshape(2, 4, 3)
    more = np.full((2, 4, 1), -1)
    more[:, 0, 0] = [next(e for e in range(EXPERTS) if e not in layer[0]) for layer in slots]
    slots = torch.tensor(np.concatenate([more, slots], axis=2).reshape(2, -1))
    homes = [[max((row == e).nonzero()[:, 0].tolist()) for e in range(EXPERTS)] for row in slots]
    before = isoload.Placement(slots, isoload.Topology(4), EXPERTS, home_slot=torch.tensor(homes))
    after = pinned(skewed(4), 4, 4, before=before, moves=2)
    assert torch.equal(after.home_slot, before.home_slot) and not torch.equal(after.slot_to_expert, slots)
    assert ((after.slot_to_expert != slots) & (after.slot_to_expert >= 0)).sum(1).max() <= 2


def test_shared_experts_keep_their_home():
    before = isoload.place(skewed(1), isoload.Topology(4), 6, "scenario", num_shared=1, pinned=True)
    homes = before.home_slot.clone()
    homes[:, EXPERTS] = 2 * 6 + 5
    before = isoload.Placement(
        before.slot_to_expert, before.topology, EXPERTS + 1, home_slot=homes, num_shared=1
    )
    after = isoload.place(
        skewed(5), isoload.Topology(4), 6, "scenario", num_shared=1, pinned=True, before=before
    )
    assert torch.equal(after.home_slot, homes) and not torch.equal(
        after.slot_to_expert, before.slot_to_expert
    )


def test_a_budget_of_replicas_is_ragged_and_pinned():
    placement = pinned(skewed(6, layers=4), 4, None, replicas=2)
    assert int((placement.slot_to_expert >= 0).sum()) == 4 * EXPERTS + 4 * 2
    assert all(placement.home_experts(layer, 1) == [3, 4, 5] for layer in range(4))


class Sharded:
    """L layers on Shards of virtual ranks, beside the dense ones."""

    def __init__(self, placement):
        draw = torch.Generator().manual_seed(0)
        self.dense = [
            ExpertWeights.random(EXPERTS, HIDDEN, INNER, generator=draw, dtype=torch.float64)
            for _ in range(2)
        ]
        self.router = torch.randn(HIDDEN, EXPERTS, generator=draw, dtype=torch.float64)
        self.router[:, :2] += 0.7
        transport = isoload.LocalTransport(placement.topology)
        self.layers = [
            isoload.MoE(self.gate, [self.shard(placement, i, r) for r in range(4)], transport, placement, i)
            for i in range(2)
        ]

    def shard(self, placement, layer, rank):
        homes = placement.home_experts(layer, rank)
        dense = self.dense[layer]
        return isoload.weights.shard.Shard(
            homes, ExpertWeights(dense.gate_up[homes].clone(), dense.down[homes].clone())
        )

    def gate(self, rows):
        weights, ids = (rows @ self.router).softmax(-1).topk(2)
        return ids, weights

    def check(self, seed=0):
        draw = torch.Generator().manual_seed(seed)
        rows = [torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64).abs() for n in (9, 0, 14, 7)]
        for layer, dense in zip(self.layers, self.dense, strict=True):
            for row, output in zip(rows, layer(rows), strict=True):
                wanted = run_experts(row, *self.gate(row), *dense.stacks().values(), None, None)
                assert torch.allclose(output, wanted, rtol=1e-12, atol=1e-12)


def test_shards_load_it_and_stay_the_dense_layer():
    first = pinned(skewed(1), 4, 5)
    model = Sharded(first)
    model.check()
    second = pinned(skewed(9), 4, 5, before=first)
    assert not torch.equal(first.slot_to_expert, second.slot_to_expert)
    for layer in model.layers:
        layer.load_placement(second)
    model.check()
    free = isoload.place(skewed(9), isoload.Topology(4), 5, "scenario")
    with pytest.raises(ValueError, match="placement must keep the homes of experts given as shards"):
        model.layers[0].load_placement(free)


def test_a_rebalancer_moves_replicas_between_shards():
    model = Sharded(pinned(np.ones((2, EXPERTS)), 4, 4))
    rebalancer = Rebalancer(
        model.layers, Recorder(2, EXPERTS), every=5, delay=1, moves=None, least_gain=0.0, pinned=True
    )
    moved = 0
    for batch in range(12):
        model.check(batch)
        moved += rebalancer.step()
    assert moved and rebalancer.last.after < rebalancer.last.before
    rebalancer.close()


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("groups must be 0 with pinned, which fixes the homes, got 2", {"groups": 2, "slots_per_rank": 4}),
        (
            "replicas must be None with pinned where 5 ranks do not divide the 12 experts, got 1",
            {"replicas": 1, "topology": isoload.Topology(5)},
        ),
        (
            "before must have pinned homes on live ranks, expert 3 of layer 0 has none",
            {
                "before": "of four ranks",
                "slots_per_rank": 5,
                "topology": isoload.Topology(4, alive=[True, False, True, True]),
            },
        ),
    ],
)
def test_refused(message, options):
    call = {"counts": np.ones((2, EXPERTS)), "topology": isoload.Topology(4), "placer": "scenario"}
    if "before" in options:
        options = {**options, "before": pinned(np.ones((2, EXPERTS)), 4, 5)}
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        isoload.place(**{**call, "pinned": True, **options})


def test_a_shared_expert_whose_home_died_is_refused():
    counts = skewed(1, experts=5)
    before = isoload.place(counts, isoload.Topology(4), 3, "scenario", num_shared=1, pinned=True)
    homes = before.home_slot.clone()
    homes[:, 5] = 3 * 3 + 2  # rank 3 is home of no routed expert
    before = isoload.Placement(before.slot_to_expert, before.topology, 6, home_slot=homes, num_shared=1)
    without = isoload.Topology(4, alive=[True, True, True, False])
    with pytest.raises(
        ValueError,
        match="^before must have pinned homes on live ranks, the home of a shared expert is on rank 3",
    ):
        isoload.place(counts, without, 3, "scenario", num_shared=1, pinned=True, before=before)
