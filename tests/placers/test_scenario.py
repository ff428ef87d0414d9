"""Placer scenario: compiled as in NumPy, against plain counting, and what it promises about moves, nodes and ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload.placers import compiled, scenario
from isoload.placers.base import make_scenarios
from isoload.placers.eplb import EplbPlacer
from isoload.placers.scenario import ScenarioPlacer
from reference.place_scenario import place_scenario
from support.placing import busiest, level_of, live_ranks_of, placed


def skewed(rng, batches, layers, experts, base=3.0):
    """[batches, L, E] counts: a skew that all batches share, and as much again of their own."""
    common, own = rng.normal(size=(1, layers, experts)), rng.normal(size=(batches, layers, experts))
    return np.floor(100 * base ** (common + own))


@pytest.fixture
def in_numpy(monkeypatch):
    """The same placers on the reference's loops."""

    def call(placer, *arguments):
        monkeypatch.setattr(scenario, "search_slots", place_scenario)
        found = placer.place(*arguments)
        monkeypatch.setattr(scenario, "search_slots", compiled.search_slots)
        return found

    return call


@pytest.mark.parametrize("split", ["even", "exact"])
@pytest.mark.parametrize("seed", range(12))
def test_compiled_loops_and_numpy_give_the_same_slots(split, seed, in_numpy, monkeypatch):
    rng = np.random.default_rng(seed)
    nodes = int(rng.choice([1, 1, 2]))
    ranks = nodes * int(rng.integers(1, 4))
    experts = int(rng.integers(2, 7)) * nodes
    slots = -(-experts // ranks) + int(rng.integers(0, 3))
    slots = min(slots, experts)
    counts = skewed(rng, int(rng.integers(1, 7)), 2, experts)
    scenarios, _ = make_scenarios(counts)
    tick = rng.choice([0.5, 1, 1.25], ranks) if seed % 3 == 0 else None
    room = live_ranks_of(ranks, slots, nodes, tick)
    placer = ScenarioPlacer(
        split, search=seed % 4 > 0, groups=2 * nodes * (nodes > 1 and experts % (2 * nodes) == 0)
    )
    fast = placer.place(scenarios, room)
    for threads in (1, 3):
        monkeypatch.setattr(scenario, "num_threads", lambda threads=threads: threads)
        np.testing.assert_array_equal(placer.place(scenarios, room).slots, fast.slots)
    plain = in_numpy(placer, scenarios, room)
    np.testing.assert_array_equal(fast.slots, plain.slots)
    assert fast.notes == plain.notes
    later, _ = make_scenarios(skewed(rng, 4, 2, experts))
    room = replace(room, before=fast.slots)
    for moves in (None, 0, 3):
        mover = replace(placer, moves=moves)
        found = mover.place(later, room)
        np.testing.assert_array_equal(found.slots, in_numpy(mover, later, room).slots)


@pytest.mark.parametrize("split", ["even", "exact"])
@pytest.mark.parametrize("seed", range(5))
def test_what_it_reaches_is_what_plain_counting_finds(split, seed):
    """The note is the mean over scenarios of the busiest rank over the mean one, up to rounding of loads."""
    rng = np.random.default_rng(seed)
    counts = skewed(rng, 5, 2, 12)
    scenarios, _ = make_scenarios(counts)
    found = ScenarioPlacer(split, shrink=0.0).place(scenarios, live_ranks_of(4, 4))
    shares = counts / counts.sum(-1, keepdims=True)
    oracle = busiest if split == "even" else level_of
    reached = 4 * oracle(found.slots.reshape(2, -1), shares, 4).mean()
    assert found.notes["seen_imbalance"] == pytest.approx(reached, rel=1e-4 if split == "even" else 5e-3)
    assert found.notes["seen_imbalance"] >= reached - 1e-4


@pytest.mark.parametrize("split", ["even", "exact"])
def test_never_worse_than_eplb_on_the_scenarios_and_no_expert_twice(split):
    rng, oracle = np.random.default_rng(3), busiest if split == "even" else level_of
    for _ in range(25):
        ranks, experts = int(rng.integers(2, 6)), int(rng.integers(4, 16))
        slots = min(-(-experts // ranks) + int(rng.integers(0, 3)), experts)
        counts = skewed(rng, int(rng.integers(1, 5)), 1, experts)
        shares = counts / counts.sum(-1, keepdims=True)
        ours = placed(ScenarioPlacer(split, shrink=0.0), counts, ranks, slots)
        eplb = placed(EplbPlacer(), counts, ranks, slots)
        assert oracle(ours, shares, ranks).mean() <= oracle(eplb, shares, ranks).mean() * (1 + 1e-4)
        assert sorted(set(ours[0].tolist())) == list(range(experts))
        assert all(len(set(row)) == slots for row in ours.reshape(ranks, -1).tolist())


def test_the_published_example_of_flashlb_is_solved_to_its_optimum():
    """EPLB's plan has 232 on the busiest rank, FlashLB's 205; an integer program proves 196.67."""
    counts = np.array([[600, 560, 120, 120, 20, 10, 10, 10.0]])
    slots = placed(ScenarioPlacer(), counts, 8, 2)
    assert busiest(slots, counts[None], 8)[0, 0] == pytest.approx(590 / 3)


def test_a_faster_rank_gets_more():
    counts = np.full((1, 1, 16), 100.0)
    tick = [0.5, 1, 1, 1]
    slots = placed(ScenarioPlacer(), counts, 4, 6, tick=tick)
    even = busiest(placed(ScenarioPlacer(), counts, 4, 6), counts, 4, tick)
    assert busiest(slots, counts, 4, tick).mean() < 0.9 * even.mean()


def test_one_copy_of_each_expert_stays_on_the_node_of_its_group():
    rng = np.random.default_rng(1)
    counts = skewed(rng, 3, 4, 32)
    slots = placed(ScenarioPlacer(groups=8), counts, 8, 5, nodes=4).reshape(4, 4, -1)
    for layer in slots:
        held = [set(node.tolist()) for node in layer]
        nodes = [[n for n in range(4) if set(range(g * 4, g * 4 + 4)) <= held[n]] for g in range(8)]
        assert all(nodes), "a group whose experts are together nowhere"


def changed(before, after):
    """Slots of each layer that got another expert: what must be loaded."""
    return ((before.slot_to_expert != after.slot_to_expert) & (after.slot_to_expert >= 0)).sum(1)


def test_layers_before_are_found_by_their_ids():
    """In whatever order, and among others; counts alone have no ids and follow those of before."""
    counts = np.ceil(1e4 * skewed(np.random.default_rng(7), 4, 3, 16)).astype(np.int64)
    topology = isoload.Topology(4)
    traces = {
        ids: isoload.traces.Trace("t", 16, counts=counts, layer_ids=ids) for ids in ((3, 4, 5), (50, 60, 70))
    }
    before = isoload.place(traces[3, 4, 5], topology, 5, "scenario")
    mixed = before.with_layers((5, 3, 4))
    after = isoload.place(traces[3, 4, 5], topology, 5, "scenario", before=mixed, moves=0)
    assert after.layer_ids == (3, 4, 5) and changed(before, after).sum() == 0
    one = traces[3, 4, 5].select_layers([1])
    some = isoload.place(one, topology, 5, "scenario", before=mixed, moves=0)
    assert some.layer_ids == (4,) and changed(before.with_layers((4,)), some).sum() == 0
    with pytest.raises(
        ValueError, match=r"^before has layers 3..5 \(.*\) and no layer 50, which trace t has: 50, 60, 70"
    ):
        isoload.place(traces[50, 60, 70], topology, 5, "scenario", before=before)
    rows = isoload.place(counts[:, [2, 0, 1]], topology, 5, "scenario", before=mixed, moves=0)
    assert rows.layer_ids == (5, 3, 4) and changed(mixed, rows).sum() == 0


@pytest.mark.parametrize("moves", [0, 1, 4, 12])
@pytest.mark.parametrize("split", ["even", "exact"])
def test_with_before_at_most_so_many_slots_change_and_never_for_the_worse(moves, split):
    rng, topology = np.random.default_rng(7), isoload.Topology(6)
    old, new = skewed(rng, 4, 3, 24), skewed(rng, 4, 3, 24)
    before = isoload.place(old, topology, 5, "scenario", split=split)
    after = isoload.place(new, topology, 5, "scenario", before=before, moves=moves, split=split, shrink=0.0)
    assert (changed(before, after) <= moves).all()
    shares, oracle = new / new.sum(-1, keepdims=True), busiest if split == "even" else level_of
    was, now = (oracle(p.slot_to_expert.numpy(), shares, 6).mean() for p in (before, after))
    assert now <= was * (1 + 1e-4)
    if moves:
        assert changed(before, after).sum() > 0 and now < 0.99 * was


def test_more_moves_are_worth_more():
    rng, topology = np.random.default_rng(8), isoload.Topology(8)
    before = isoload.place(skewed(rng, 4, 4, 32), topology, 5, "scenario")
    new = skewed(rng, 4, 4, 32)
    shares, reached = new / new.sum(-1, keepdims=True), []
    for moves in (0, 2, 6, 40):
        after = isoload.place(new, topology, 5, "scenario", before=before, moves=moves, shrink=0.0)
        reached.append(busiest(after.slot_to_expert.numpy(), shares, 8).mean())
    assert reached == sorted(reached, reverse=True) and reached[-1] < 0.8 * reached[0]


@pytest.mark.parametrize("split", ["even", "exact"])
def test_layers_whose_gain_is_too_small_keep_their_slots(split):
    """Steady traffic moves nothing where the placement is level; of two layers that drift, the one that gains moves."""
    rng, topology = np.random.default_rng(5), isoload.Topology(8)
    shares = rng.dirichlet(np.full(64, 0.5), 4)
    options = {"split": split, "least_gain": 0.02}
    before = isoload.place(rng.multinomial(200_000, shares)[None], topology, 10, "scenario", split=split)
    steady = rng.multinomial(200_000, shares)[None]
    same = isoload.place(steady, topology, 10, "scenario", before=before, **options)
    assert changed(before, same).sum() == 0 and same.provenance["layers_kept"] == 4
    plain = isoload.place(steady, topology, 10, "scenario", before=before, split=split)
    assert (changed(before, plain).sum() > 0) == (split == "even")  # the exact split is level already
    drifted = steady.copy()
    drifted[0, 2] = drifted[0, 2][rng.permutation(64)]
    after = isoload.place(drifted, topology, 10, "scenario", before=before, **options)
    assert (changed(before, after) > 0).tolist() == [False, False, True, False]
    assert after.provenance["layers_kept"] == 3
    anew = isoload.place(steady, topology, 10, "scenario", split=split)
    assert isoload.place(steady, topology, 10, "scenario", **options).slot_to_expert.equal(
        anew.slot_to_expert
    )


def test_experts_of_a_lost_rank_get_a_slot_whatever_the_gain():
    counts = skewed(np.random.default_rng(9), 3, 2, 12)
    before = isoload.place(counts, isoload.Topology(4), 4, "scenario")
    without = isoload.Topology(4, alive=[True, False, True, True])
    after = isoload.place(counts, without, 4, "scenario", before=before, least_gain=1e9)
    assert all(set(row.tolist()) >= set(range(12)) for row in after.slot_to_expert)
    with pytest.raises(ValueError, match=r"^least_gain must be a number from 0 on, got -0\.1$"):
        isoload.place(counts, without, 4, "scenario", before=before, least_gain=-0.1)


def test_when_a_rank_dies_lost_experts_come_first_and_when_it_returns_it_is_filled():
    rng = np.random.default_rng(9)
    counts = skewed(rng, 3, 2, 12)
    before = isoload.place(counts, isoload.Topology(4), 4, "scenario")
    lost = [
        set(row[4:8].tolist()) - set(row[[*range(4), *range(8, 16)]].tolist())
        for row in before.slot_to_expert
    ]
    assert any(lost)
    without = isoload.Topology(4, alive=[True, False, True, True])
    after = isoload.place(counts, without, 4, "scenario", before=before, moves=4)
    assert (after.slot_to_expert.view(2, 4, 4)[:, 1] == -1).all()
    live = [0, 2, 3]
    same = before.slot_to_expert.view(2, 4, 4)[:, live] == after.slot_to_expert.view(2, 4, 4)[:, live]
    assert ((~same).flatten(1).sum(1) <= 4).all()
    needed = max(map(len, lost))
    with pytest.raises(ValueError, match=f"^moves must be at least {needed}: so many slots change"):
        isoload.place(counts, without, 4, "scenario", before=before, moves=needed - 1)
    back = isoload.place(counts, isoload.Topology(4), 4, "scenario", before=after, moves=4)
    assert (back.slot_to_expert.view(2, 4, 4)[:, 1] >= 0).sum() > 0
    assert (changed(after, back) <= 4).all()


def test_shrink_mixes_every_scenario_with_the_mean():
    scenarios, _ = make_scenarios(np.array([[[3.0, 1]], [[1, 3]]]))
    np.testing.assert_allclose(scenarios.shares(0.5), [[[0.625, 0.375]], [[0.375, 0.625]]])
    assert scenarios.shares(None).tolist() == scenarios.shares(0.2).tolist(), "a few copies are mostly noise"
    large, _ = make_scenarios(1e6 * np.array([[[3.0, 1]], [[1, 3]]]))
    assert large.shares(None).tolist() == large.shares(0.0).tolist()


def test_a_batch_without_copies_in_a_layer_counts_for_nothing_there():
    rng = np.random.default_rng(2)
    counts = skewed(rng, 3, 1, 10)
    empty = np.concatenate([counts, np.zeros((1, 1, 10))])
    a, b = (placed(ScenarioPlacer(shrink=0.0), c, 5, 3) for c in (counts, empty))
    assert busiest(a, counts, 5).mean() == pytest.approx(busiest(b, counts, 5).mean(), rel=0.05)
    assert sorted(set(placed(ScenarioPlacer(), np.zeros((1, 1, 10)), 5, 3)[0].tolist())) == list(range(10))


REFUSED = [
    ("split must be even or exact, got 'best'", {"split": "best"}),
    ("shrink must be in 0..1, got 1.5", {"shrink": 1.5}),
    ("shrink must be finite, got nan", {"shrink": float("nan")}),
    ("groups must divide the 8 experts, got 3", {"groups": 3}),
    ("groups must divide the 8 experts, got -1", {"groups": -1}),
    ("groups must be a multiple of the 2 live nodes, got 1", {"groups": 1}),
    ("moves must come with before, got 2 without", {"moves": 2}),
    (
        "slots_per_rank must be at most 8 without spare slots, one for each expert, got 9",
        {"slots_per_rank": 9},
    ),
]


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_scenario_names_what_it_refuses(message, options):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.place(np.ones((1, 8)), isoload.Topology(4, 2), **{"placer": "scenario", **options})


BEFORE = isoload.place(np.ones((2, 8)), isoload.Topology(4), 4, spare_slots=1)
REFUSED_BEFORE = [
    ("before must be None for placer eplb, which places from scratch", {"placer": "eplb"}),
    ("before must have 1 layers, got 2", {"counts": np.ones((1, 8))}),
    ("before must have 7 routed experts, got 8", {"counts": np.ones((2, 7))}),
    ("before must have 0 spare slots, got 1", {"spare_slots": 0}),
    ("before must have 1 shared experts, got 0", {"num_shared": 1, "counts": np.ones((2, 8))}),
    ("moves must be at least 0, got -1", {"moves": -1}),
]


@pytest.mark.parametrize(("message", "options"), REFUSED_BEFORE)
def test_place_names_what_it_refuses_of_before(message, options):
    call = {"counts": np.ones((2, 8)), "topology": isoload.Topology(4), "slots_per_rank": 4, "spare_slots": 1}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.place(**{**call, "placer": "scenario", "before": BEFORE, **options})


def test_traces_weigh_alike_and_hand_on_their_layers():
    rng = np.random.default_rng(4)
    few, many = (skewed(rng, n, 2, 6).astype(np.int64) for n in (2, 100))
    traces = [
        isoload.traces.Trace(name, 6, counts=c, layer_ids=(3, 5))
        for name, c in (("few", few), ("many", 9 * many))
    ]
    scenarios, _ = make_scenarios(traces)
    assert len(scenarios.loads) == 2 + 32 and scenarios.weight.sum() == pytest.approx(1)
    assert scenarios.weight[:2].sum() == pytest.approx(0.5)
    assert scenarios.loads[:2].sum() == pytest.approx(scenarios.loads[2:].sum())
    placement = isoload.place(traces, isoload.Topology(3), 3, "scenario")
    assert placement.layer_ids == (3, 5)
    assert placement.provenance["traces"] == ["few", "many"] and placement.provenance["placer"] == "scenario"
    single = isoload.place(traces[0], isoload.Topology(3), 3)
    assert torch.equal(single.slot_to_expert, isoload.place(few, isoload.Topology(3), 3).slot_to_expert)


def test_place_names_what_it_refuses_of_traces():
    def trace(name, **fields):
        fields = {"num_experts": 4, "counts": np.ones((1, 2, fields.get("num_experts", 4)), int), **fields}
        return isoload.traces.Trace(name, **fields)

    a, empty = trace("a"), trace("empty", counts=np.zeros((1, 2, 4), int))
    for traces, message in (
        ([a, trace("b", num_experts=5)], "num_experts must agree in all traces, a has 4, b 5"),
        (
            [a, trace("b", layer_ids=(3, 4))],
            "trace a does not state which layers of the model its 2 rows are",
        ),
        ([trace("c", layer_ids=(1, 2)), trace("b", layer_ids=(3, 4))], "trace b has layers 3..4"),
        ([a, empty], "counts must not be empty, trace empty has no copies"),
        (empty, "counts must not be empty, trace empty has no copies"),
        (
            [a, [[1]]],
            "counts must be an array, a trace, or a list of traces only, got a list with other items",
        ),
        ([a] * 65, "counts must be at most 64 traces, got 65"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            isoload.place(traces, isoload.Topology(2))
