"""Fewer rows to other nodes at the same load: compiled as in NumPy, against brute force, and what stays as before."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

import isoload
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.placers import compiled, scenario
from isoload.placers import scenario as near
from isoload.placers.base import make_scenarios
from isoload.placers.compiled import near_slots
from isoload.placers.scenario import ScenarioPlacer
from isoload.traces import Trace
from reference.place_near import Rows, place_near
from support.placing import level_of, live_ranks_of


def drawn_trace(rng, tokens, layers, experts, top_k, batches, groups=1):
    """Tokens of skewed experts; with groups a token takes most of its experts from one of them."""
    base = rng.normal(size=(layers, experts))
    ids = np.empty((tokens, layers, top_k), dtype=np.int32)
    for token, layer in itertools.product(range(tokens), range(layers)):
        wish = base[layer] + 2 * (np.arange(experts) % groups == rng.integers(groups))
        ids[token, layer] = np.argsort(-(wish + rng.gumbel(size=experts)))[:top_k]
    parts = [len(part) for part in np.array_split(np.arange(tokens), batches)]
    return Trace("drawn", experts, topk_ids=ids, tokens_per_batch=np.array(parts))


@pytest.fixture
def short(monkeypatch):
    """Searches that the reference can follow."""
    monkeypatch.setattr(near, "STEPS", 240)
    monkeypatch.setattr(near, "LONGEST", 120)


@pytest.mark.parametrize("kind", ["plain", "exact", "ticks", "groups", "pinned", "moves"])
@pytest.mark.parametrize("seed", range(3))
def test_compiled_loops_and_numpy_give_the_same_slots(kind, seed, short, monkeypatch):
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(2, 4))
    ranks, experts = 2 * nodes, 2 * nodes * int(rng.integers(1, 4))
    slots = min(experts, -(-experts // ranks) + 1)
    scenarios, _ = make_scenarios(drawn_trace(rng, 40, 2, experts, 2, 3))
    live_ranks = live_ranks_of(
        ranks, slots, nodes, rng.choice([0.5, 1, 1.25], ranks) if kind == "ticks" else None
    )
    options = {"exact": {"split": "exact"}, "groups": {"groups": nodes}, "pinned": {"pinned": True}}
    placer = ScenarioPlacer(**options.get(kind, {}))
    if kind == "moves":
        before = placer.place(make_scenarios(drawn_trace(rng, 40, 2, experts, 2, 3))[0], live_ranks).slots
        live_ranks, placer = dataclasses.replace(live_ranks, before=before), ScenarioPlacer(moves=4)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(near, "num_threads", lambda threads=threads: threads)
        found.append(placer.place(scenarios, live_ranks))
    monkeypatch.setattr(near, "near_slots", place_near)
    plain = placer.place(scenarios, live_ranks)
    for other in found:
        np.testing.assert_array_equal(other.slots, plain.slots)
        assert other.notes == plain.notes
    if kind == "moves":
        for old, new in zip(before, plain.slots, strict=True):
            come = sum(len(set(now) - set(then) - {-1}) for then, now in zip(old, new, strict=True))
            assert come <= 4
    if kind == "pinned":
        homes = scenario.pinned_homes(live_ranks, scenarios)
        assert all(e in plain.slots[layer, homes[layer, e]] for layer in (0, 1) for e in range(experts))


def counted_rows(ids, slots, node, ranks):
    """Rows as docs/record-and-place.md defines them, token by token, over all nodes that a token may come from."""
    held = [
        {e for r in range(ranks) if node[r] == n for e in slots[r] if e >= 0} for n in range(max(node) + 1)
    ]
    total = 0
    for position, chosen in enumerate(ids):
        for own in range(len(held)):
            sent = set()
            for k, e in enumerate(chosen):
                if e < 0 or e in held[own]:
                    continue
                nodes = [n for n in range(len(held)) if e in held[n]]
                number = ((position * len(chosen) + k) * 2654435769 % 2**32) >> 16
                sent.add(nodes[number % len(nodes)])
            total += len(sent)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_plain_counting(seed):
    rng = np.random.default_rng(seed)
    trace = drawn_trace(rng, 100, 1, 12, 3, 4, groups=3)
    trace.topk_ids[::7, :, 2] = -1
    trace = Trace("t", 12, topk_ids=trace.topk_ids, tokens_per_batch=trace.tokens_per_batch)
    scenarios, _ = make_scenarios(trace)
    live_ranks = live_ranks_of(6, 3, 3)
    first = ScenarioPlacer(near=False).place(scenarios, live_ranks)
    placed = ScenarioPlacer().place(scenarios, live_ranks)
    rows = [counted_rows(trace.topk_ids[:, 0], p.slots[0], live_ranks.node, 6) for p in (first, placed)]
    assert placed.notes["rows_to_other_nodes"] == [round(number / 300, 4) for number in rows]
    assert rows[1] <= rows[0]


def every_placement(experts, ranks, slots):
    """[n, ranks, slots] all placements with an expert at most once on a rank that hold every expert."""
    sets = np.array(list(itertools.combinations(range(experts), slots)))
    index = np.stack(np.meshgrid(*[np.arange(len(sets))] * ranks, indexing="ij"), -1).reshape(-1, ranks)
    every = sets[index]
    return every[np.stack([(every == e).any((1, 2)) for e in range(experts)]).all(0)], len(index)


@pytest.mark.parametrize("cases", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_against_all_placements_under_the_same_caps(cases):
    """6 experts on 2 nodes of 2 ranks with 2 slots: 50,625 placements, less those that lack an expert."""
    every, number = every_placement(6, 4, 2)
    assert number == 50_625
    live_ranks, worst = live_ranks_of(4, 2, 2), 0.0
    for seed in range(cases):
        trace = drawn_trace(np.random.default_rng(seed), 60, 1, 6, 2, 3, groups=2)
        scenarios, _ = make_scenarios(trace)
        start = ScenarioPlacer(near=False).place(scenarios, live_ranks).slots
        placed = ScenarioPlacer().place(scenarios, live_ranks)
        loads, stress = near.scaled(scenarios.shares())[:, 0], near.stressed(scenarios)[:, 0]
        share = (
            scenarios.weight
            @ loads
            / np.maximum(1, np.stack([(every == e).sum((1, 2)) for e in range(6)], 1))
        )
        mean = np.take_along_axis(share[:, None], every, 2).sum(2).max(1)
        cap = max(even_mean(start[0], loads, scenarios.weight), 1.02 * (scenarios.weight @ loads).sum() / 4)
        fits = every[mean <= cap + 1]
        level = levels(fits, stress, scenarios.weight)
        most = scenarios.weight @ level_of(start.reshape(1, -1), stress[:, None], 4)[:, 0]
        fits = fits[level <= max(most, level_of_one(placed.slots, stress, scenarios.weight)) * 1.0001]
        rows = Rows(trace.topk_ids[:, 0], np.ones(60, int), live_ranks.node, 6)
        least = min(rows.total(slots.ravel()) for slots in distinct_by_node(fits))
        worst = max(worst, placed.notes["rows_to_other_nodes"][1] * 120 / least)
    assert worst <= 1.05


def even_mean(slots, loads, weight):
    """The highest mean load of a rank, replicas sharing alike."""
    copies = np.bincount(slots.ravel(), minlength=loads.shape[1])
    return max(sum(weight @ loads[:, e] / copies[e] for e in rank) for rank in slots)


def level_of_one(slots, stress, weight):
    return weight @ level_of(slots.reshape(1, -1), stress[:, None], 4)[:, 0]


def levels(every, stress, weight):
    """[n] mean over scenarios of the least possible peak of placements [n, 4, 2]."""
    holds = np.stack([(every == e).any(2) for e in range(stress.shape[1])], 2)  # [n, R, E]
    peak = np.zeros((len(every), len(stress)))
    for size in range(1, 5):
        for some in itertools.combinations(range(4), size):
            inside = ~np.delete(holds, some, axis=1).any(1)
            peak = np.maximum(peak, inside @ stress.T / size)
    return peak @ weight


def distinct_by_node(every):
    """Placements [n, 4, 2], one of each set of those whose nodes hold the same experts."""
    nodes = np.stack([(every.reshape(len(every), 2, 4) == e).any(2) for e in range(6)], 2).reshape(
        len(every), -1
    )
    return every[np.unique(nodes, axis=0, return_index=True)[1]]


def test_on_one_node_and_for_counts_alone_the_slots_are_those_without():
    trace = drawn_trace(np.random.default_rng(0), 200, 2, 12, 3, 4, groups=3)
    one = [isoload.place(trace, isoload.Topology(4), 4, "scenario", near=on) for on in (True, False)]
    assert one[0].slot_to_expert.equal(one[1].slot_to_expert)
    assert "rows_to_other_nodes" not in one[0].provenance
    counts = trace.batch_counts()
    two = [isoload.place(counts, isoload.Topology(4, 2), 4, "scenario", near=on) for on in (True, False)]
    assert two[0].slot_to_expert.equal(two[1].slot_to_expert)
    unlike = isoload.place(trace, isoload.Topology(4, 2), 4, "scenario")
    assert not unlike.slot_to_expert.equal(two[1].slot_to_expert)
    assert two[1].slot_to_expert.equal(
        isoload.place(trace, isoload.Topology(4, 2), 4, "scenario", search=True, near=False).slot_to_expert
    )


def test_traces_weigh_alike_and_long_ones_are_thinned(monkeypatch):
    rng = np.random.default_rng(3)
    traces = [drawn_trace(rng, tokens, 1, 8, top_k, 2) for tokens, top_k in ((30, 2), (90, 3))]
    traces[0] = dataclasses.replace(traces[0], name="few")
    scenarios, _ = make_scenarios(traces)
    ids, weight = near.choose_tokens(scenarios)
    assert ids.shape == (120, 1, 3) and (ids[:30, :, 2] == -1).all()
    assert weight[:30].sum() == weight[30:].sum() == 90
    monkeypatch.setattr(near, "MAX_TOKENS", 100)
    assert [len(near.choose_tokens(scenarios)[0]), near.choose_tokens(scenarios)[1].tolist()[0]] == [80, 2]


def arguments(**changed):
    loads = np.ones((1, 4, 4))
    own = {
        "slots": np.array([[[0, 1], [2, 3]]]), "loads": loads, "stress": loads, "weight": np.full(4, 0.25),
        "tick": np.ones(2), "node": np.arange(2), "home": np.full((1, 4), -1), "before": None,
        "topk_ids": np.array([[[0, 1], [2, 3]]]), "token_weight": np.ones(2), "rows_node": np.arange(2),
        "steps": 10, "walk": 0, "moves": -1, "starts": 1, "threads": 1,
    }  # fmt: skip
    return {**own, **changed}


REFUSED = [
    (
        {"topk_ids": np.array([[[0, 4]]]), "token_weight": np.ones(1)},
        "topk_ids must be in -1..3, the experts of the",
    ),
    ({"topk_ids": np.zeros((2, 2, 2))}, "topk_ids must be [L, tokens, K] for the 1 layers of the loads"),
    (
        {"topk_ids": np.zeros((1, 2, 65))},
        "topk_ids must be [L, tokens, K] for the 1 layers of the loads, K at most 64",
    ),
    ({"token_weight": np.ones(3)}, "token_weight must be [2]"),
    ({"rows_node": np.array([0, 64])}, "rows_node must be in 0..63"),
    (
        {"slots": np.array([[[0, 0], [2, 3]]])},
        "slots must have experts within capacity, none twice on a rank",
    ),
    ({"slots": np.array([[[0, 1], [2, -1]]])}, "slots must hold all 4 experts"),
    ({"before": np.array([[[0, 4], [2, 3]]])}, "before must have experts within capacity"),
    ({"stress": np.ones((1, 4, 8))}, "stress must be [1, 4, 4]"),
    ({"loads": np.ones((1, 4, 3))}, "loads must be [L, E, n], n a multiple of 4"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_names_what_it_refuses(changed, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        near_slots(**arguments(**changed))


SEARCHED = {
    "loads": np.ones((1, 4, 4)), "weight": np.full(4, 0.25), "tick": np.ones(2), "node": np.arange(2),
    "home": np.full((1, 4), -1), "capacity": np.array([[2, 3]]), "risks": np.ones((1, 1, 4)), "rival": None,
    "before": None, "width": 3, "exact": False, "few_slots": False, "steps": 5, "moves": -1, "threads": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ["rival", "before"])
@pytest.mark.parametrize(
    "slots", [[[0, 0, -1], [1, 2, 3]], [[1, 2, 0], [0, 3, -1]]], ids=["expert 0 twice", "0 beyond capacity"]
)
def test_slots_that_are_taken_over_are_checked_for_expert_0_too(name, slots):
    with pytest.raises(ValueError, match=f"^{name} must have experts within capacity, none twice on a rank"):
        compiled.search_slots(**{**SEARCHED, name: np.array([slots])})


def test_experts_that_tokens_choose_together_come_to_one_node():
    """Judged on tokens that the placement has not seen: fewer rows, and the exact split's peak stays."""
    rng = np.random.default_rng(5)
    seen = drawn_trace(rng, 1500, 2, 32, 4, 6, groups=4)
    state = np.random.default_rng(5)
    state.normal(size=(2, 32))
    later = dataclasses.replace(
        seen, name="later", topk_ids=seen.topk_ids[750:], tokens_per_batch=np.full(3, 250)
    )
    first = dataclasses.replace(
        seen, name="first", topk_ids=seen.topk_ids[:750], tokens_per_batch=np.full(3, 250)
    )
    found = {}
    for on in (False, True):
        placement = isoload.place(first, isoload.Topology(8, 2), 5, "scenario", near=on)
        settings = ReplaySettings(8, 2, 5, batch_tokens=250, policies=("exact",))
        row = replay(later, settings, placement=placement).policies[0]
        found[on] = row.node_dispatch_rows, row.imbalance_mean
    assert found[True][0] <= 0.9 * found[False][0]
    assert found[True][1] <= 1.01 * found[False][1]
