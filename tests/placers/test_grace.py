"""Placer grace: groups by affinity, sizes within bounds, replicas and weights as the paper's equations say."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

import isoload
from isoload.placers.base import LiveRanks, make_scenarios
from isoload.placers.grace import (
    bounded,
    co_activation,
    controlled,
    copy_everywhere,
    deviation,
    group_ranks,
    knee,
    partners,
    replicate,
    utilised,
)
from isoload.weights.experts import ExpertWeights
from reference.experts import run_experts

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

EXPERTS, TOP_K = 16, 3


def make_trace(blocks, tokens=400, layers=2, seed=0, strays=0.05):
    """Tokens that choose inside one of the blocks of experts, but for a few; another deal of experts in each layer."""
    draw = np.random.default_rng(seed)
    ids = np.zeros((tokens, layers, TOP_K), dtype=np.int32)
    deals = [draw.permutation(EXPERTS) for _ in range(layers)]
    for token in range(tokens):
        for layer, deal in enumerate(deals):
            block = blocks[draw.integers(len(blocks))]
            pool = deal if draw.random() < strays else deal[list(block)]
            ids[token, layer] = draw.choice(pool, TOP_K, replace=False)
    return isoload.traces.Trace("made", EXPERTS, topk_ids=ids), deals


BLOCKS = [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]


def ranks_of(placement, layer):
    """[R] sets of the experts at home, and of all."""
    slots = placement.arrays[0][layer].reshape(placement.topology.num_ranks, -1)
    return [set(row[row >= 0].tolist()) for row in slots]


def test_affinity_counts_tokens_that_choose_both():
    trace, _ = make_trace(BLOCKS, tokens=50)
    scenarios, _ = make_scenarios(trace)
    wanted = np.zeros((EXPERTS, EXPERTS))
    for token in trace.topk_ids[:, 1]:
        for a in token:
            for b in token:
                wanted[a, b] += a != b
    assert np.allclose(co_activation(scenarios, 1) * 50, wanted)


def test_planted_groups_come_back():
    trace, deals = make_trace(BLOCKS)
    placement = isoload.place(trace, isoload.Topology(4), placer="grace", replicate=False)
    for layer, deal in enumerate(deals):
        wanted = {frozenset(deal[list(block)].tolist()) for block in BLOCKS}
        assert set(map(frozenset, ranks_of(placement, layer))) == wanted
    assert placement.slots_per_rank == 4 and placement.provenance["placer"] == "grace"


def test_nodes_take_whole_clusters_of_any_size():
    """Two clusters of 10 and 6 over two nodes of two ranks: no cluster is cut between nodes."""
    trace, deals = make_trace([range(0, 10), range(10, 16)])
    placement = isoload.place(trace, isoload.Topology(4, 2), placer="grace", replicate=False, ratio=0.2)
    for layer, deal in enumerate(deals):
        held = ranks_of(placement, layer)
        nodes = {frozenset(held[0] | held[1]), frozenset(held[2] | held[3])}
        assert nodes == {frozenset(deal[:10].tolist()), frozenset(deal[10:].tolist())}
        assert sorted(map(len, held)) in ([3, 3, 5, 5], [2, 4, 5, 5], [2, 4, 4, 6], [3, 3, 4, 6])


@pytest.mark.parametrize("seed", range(6))
def test_any_affinity_gives_every_expert_one_home_within_bounds(seed):
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(1, 7))
    experts = int(draw.integers(ranks, 20))
    affinity = draw.random((experts, experts)) ** 4
    affinity = affinity + affinity.T
    np.fill_diagonal(affinity, 0)
    node = np.sort(draw.integers(0, 3, ranks)).astype(np.int32)
    groups = group_ranks(affinity, LiveRanks(node, np.ones(ranks), None), None)
    assert sorted(e for g in groups for e in g) == list(range(experts)) and all(groups)
    mean, ratio = experts // ranks, float(draw.random())
    delta = max(1, round(mean * ratio))
    for group in controlled(affinity, list(range(experts)), ranks, ratio):
        assert max(1, mean - delta) <= len(group) <= mean + delta


def test_the_weakest_leave_and_go_where_they_fit():
    affinity = np.zeros((5, 5))
    for a, b, w in ((0, 1, 9), (0, 2, 8), (1, 2, 7), (2, 3, 1), (3, 4, 6)):
        affinity[a, b] = affinity[b, a] = w
    assert list(map(sorted, bounded(affinity, [[0, 1, 2, 3], [4]], 1, 3))) == [[0, 1, 2], [3, 4]]
    assert list(map(sorted, bounded(affinity, [[0, 1, 2, 3], [4]], 2, 4))) == [[0, 1, 2], [3, 4]]
    assert utilised(affinity, [[0, 1, 2], [3, 4]]) == pytest.approx(30 / 31)
    assert deviation([[0, 1, 2], [3, 4]]) == 0.5
    assert knee([0.0, 1.0, 2.0], [0.5, 0.9, 1.0]) == 1 and knee([1.0, 1.0], [0.3, 0.4]) == 1


def test_replicas_and_weights_by_hand():
    """Loads 60, 20, 10, 10 of four ranks: rho = 2.4, n = 2; experts above 60 * 2/3 = 40 are hot: 35 + 15."""
    groups = [[0, 1, 2], [3], [4], [5]]
    load = np.array([35.0, 10, 15, 20, 10, 10])
    copies, weight = replicate(groups, load, True, False)
    assert copies == [[], [], [0, 2], [0, 2]]
    part = 50 / 3
    assert weight == pytest.approx([25 / (10 + part), 25 / 20, 25 / (10 + part), 25 / (10 + part)])
    _, printed = replicate(groups, load, True, True)
    assert printed == pytest.approx([25 / (10 + 20), 25 / 20, 25 / 30, 25 / 30])
    assert replicate(groups, load, False, False) == ([[], [], [], []], [25 / 60, 25 / 20, 2.5, 2.5])
    assert replicate([[0, 1, 2, 3, 4, 5]], load, True, False) == ([[]], [1.0])
    assert replicate(groups, load * 0, True, False) == ([[]] * 4, [1.0] * 4)


def test_algorithm_3_as_printed():
    """By hand: an expert that leaves goes to the group of the largest score, although it adds nothing there."""
    affinity = np.zeros((9, 9))
    for a, b, w in ((0, 1, 20), (0, 2, 20), (3, 4, 9), (3, 5, 8), (4, 5, 7), (3, 6, 1), (6, 7, 2), (7, 8, 5)):
        affinity[a, b] = affinity[b, a] = w
    found = [[0, 1, 2], [3, 4, 5, 6], [7, 8]]  # 6 is the weakest of the second, and adds 2 to the third
    assert list(map(sorted, bounded(affinity, found, 1, 3))) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    found = [[0, 1], [2], [3, 4, 5, 6], [7, 8]]
    assert list(map(sorted, bounded(affinity, found, 1, 3))) == [[0, 1], [2], [3, 4, 5], [6, 7, 8]]
    assert list(map(sorted, bounded(affinity, found, 1, 3, True))) == [[0, 1, 6], [2], [3, 4, 5], [7, 8]]
    needy = [[0, 1, 2], [4, 5, 3, 6], [7], [8]]
    assert list(map(sorted, bounded(affinity, needy, 2, 4))) == [[0, 1, 2], [3, 4], [6, 7], [5, 8]]


def test_experts_on_every_rank_by_hand():
    """Copies of two experts everywhere; what stays is 45, 10, 5 and 40 of 100, and a quarter of 60 on each rank."""
    groups, load = [[0, 1, 2], [3], [4], [5]], np.array([35.0, 5, 40, 10, 5, 25])
    copies, weight = copy_everywhere(groups, load, load, 2)
    assert copies == [[], [2, 0], [2, 0], [2, 0]]
    after = np.array([5, 10, 5, 25]) + 75 / 4
    assert weight == pytest.approx(30 / after)
    rare = np.array([0.0, 9, 0, 0, 9, 0])
    assert copy_everywhere(groups, load, rare, 2)[0] == [[4], [1, 4], [1], [1, 4]]
    assert copy_everywhere(groups, 0 * load, load, 1)[1] == [1.0] * 4


def test_partners_are_counted_by_how_even_they_are():
    affinity = np.array([[0, 4, 4, 4], [4, 0, 0, 0], [4, 0, 0, 100], [4, 0, 100, 0.0]])
    found = partners(affinity)
    assert found[:2] == pytest.approx([3, 1]) and 1 < found[2] == found[3] < 2
    assert partners(np.zeros((2, 2))).tolist() == [1, 1]


@pytest.mark.parametrize("collaborative", [False, True])
def test_so_many_experts_on_every_rank(collaborative):
    trace, _ = make_trace(BLOCKS)
    options = {"placer": "grace", "everywhere": 3, "collaborative": collaborative}
    placement = isoload.place(trace, isoload.Topology(4), **options)
    for layer in range(2):
        assert len(set.intersection(*ranks_of(placement, layer))) == 3
    assert placement.replica_weight is not None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"everywhere": 0}, r"everywhere must be in 1\.\.16 for these experts, and replicate on, got 0"),
        ({"everywhere": 17}, r"everywhere must be in 1\.\.16 .*, got 17"),
        ({"everywhere": 2, "replicate": False}, r"everywhere must be in 1\.\.0 .* replicate on, got 2"),
        (
            {"replicas": 4},
            r"replicas must be in 1\.\.3 for these ranks, with replicate and without everywhere, got 4",
        ),
        ({"replicas": 1, "everywhere": 2}, r"replicas must be in 1\.\.0 .*, got 1"),
        ({"collaborative": True}, "collaborative must come with everywhere, the number of these experts"),
    ],
)
def test_copies_everywhere_refused(options, message):
    with pytest.raises(ValueError, match=message):
        isoload.place(make_trace(BLOCKS, tokens=20)[0], isoload.Topology(4), placer="grace", **options)


def test_a_ragged_placement_computes_the_dense_layer():
    trace, _ = make_trace([range(0, 7), range(5, 12), range(12, 16)])
    placement = isoload.place(trace, isoload.Topology(3), placer="grace", ratio=1.0)
    assert len({len(held) for held in ranks_of(placement, 1)}) > 1
    dense = ExpertWeights.random(EXPERTS, 8, 6, dtype=torch.float64)
    router = torch.randn(8, EXPERTS, dtype=torch.float64)

    def gate(rows):
        weights, ids = (rows @ router).softmax(-1).topk(TOP_K)
        return ids, weights

    layer = isoload.MoE(gate, dense, isoload.LocalTransport(placement.topology), placement, layer=1)
    rows = [torch.randn(n, 8, dtype=torch.float64) for n in (9, 0, 5)]
    for row, output in zip(rows, layer(rows), strict=True):
        wanted = run_experts(row, *gate(row), *dense.stacks().values(), None, None)
        assert torch.allclose(output, wanted, rtol=1e-12, atol=1e-12)
    assert layer.last_plan.peak == layer.last_plan.bound


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    trace, _ = make_trace(BLOCKS, tokens=20)
    with pytest.raises(ImportError, match=r"placer grace needs scikit-learn: pip install 'isoload\[plan\]'"):
        isoload.place(trace, isoload.Topology(4), placer="grace")


@pytest.mark.parametrize("slots", [4, 5, 8])
def test_equal_groups_fill_every_slot_with_what_helps_most(slots):
    """The planted groups come back, and every replica is of an expert that its rank lacks; checked by plain loops."""
    trace, deals = make_trace(BLOCKS)
    placement = isoload.place(trace, isoload.Topology(4), slots, "grace", equal=True)
    assert placement.slots_per_rank == slots and bool((placement.slot_to_expert >= 0).all())
    loads = trace.batch_counts().sum(0)
    for layer, deal in enumerate(deals):
        table = placement.slot_to_expert[layer].view(4, -1)
        wanted = {frozenset(deal[list(block)].tolist()) for block in BLOCKS}
        on_rank = [row[:4].tolist() for row in table]
        assert set(map(frozenset, on_rank)) == wanted
        for place in range(4 * (slots - 4)):
            copies = {e: sum(e in of for of in on_rank) for e in range(EXPERTS)}
            work = [sum(loads[layer][e] / copies[e] for e in of) for of in on_rank]
            free = [r for r in range(4) if len(on_rank[r]) < slots]
            taker = min(free, key=lambda r: (work[r], r))
            giver = next(
                r
                for r in sorted(range(4), key=lambda r: (-work[r], r))
                if set(on_rank[r]) - set(on_rank[taker])
            )
            rest = sorted(set(on_rank[giver]) - set(on_rank[taker]))
            hottest = max(rest, key=lambda e: (loads[layer][e] / copies[e], -e))
            assert table[taker, len(on_rank[taker])] == hottest, (layer, place)
            on_rank[taker].append(hottest)


@pytest.mark.parametrize("alive", [(True,) * 4, (True, True, True, False, True, True)])
def test_equal_groups_of_any_affinity_are_equal(alive):
    """Also on nodes with fewer live ranks."""
    draw, ranks = np.random.default_rng(1), len(alive)
    ids = np.stack([draw.permutation(20)[:4] for _ in range(300)])[:, None, :].astype(np.int32)
    trace = isoload.traces.Trace("t", 20, 4, topk_ids=ids)
    topology = isoload.Topology(ranks, ranks // 2, alive=None if all(alive) else alive)
    placement = isoload.place(trace, topology, placer="grace", equal=True)
    table = placement.slot_to_expert[0].view(ranks, -1)
    live = [sorted(row.tolist()) for row, there in zip(table, alive, strict=True) if there]
    assert sorted(e for row in live for e in row) == list(range(20))


def test_a_file_of_equal_groups_starts_an_engine(tmp_path):
    trace, _ = make_trace(BLOCKS, tokens=50)
    placement = isoload.place(trace, isoload.Topology(4), 5, "grace", equal=True)
    placement = placement.with_moe_layers(moe_layers=range(len(placement.slot_to_expert)))
    isoload.write_placement(placement, tmp_path / "p.json", "sglang")
    table = json.loads((tmp_path / "p.json").read_text())["physical_to_logical_map"]
    assert table == placement.slot_to_expert.tolist()


def test_refused():
    trace, _ = make_trace(BLOCKS, tokens=20)
    topology = isoload.Topology(4)
    for counts, ranks, how, message in (
        (torch.ones(2, EXPERTS), topology, {}, r"counts must be traces with per-token choices \(topk_ids\)"),
        (
            trace,
            isoload.Topology(17),
            {},
            "experts must be at least as many as the 17 ranks for placer grace, got 16",
        ),
        (trace, topology, {"ratio": 1.5}, "ratio must be in 0..1, got 1.5"),
        (
            trace,
            topology,
            {"equal": True, "printed": True},
            "equal must come without the other options of placer",
        ),
        (trace, 3, {"equal": True}, "equal needs experts that the 3 ranks can share evenly, got 16"),
        (
            trace,
            topology,
            {"slots_per_rank": 4, "ratio": 1.0},
            "slots_per_rank must leave a rank 6 routed slots for these groups and replicas, got 4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            isoload.place(counts, ranks, placer="grace", **how)
