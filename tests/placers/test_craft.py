"""Placer craft and budgets of replicas: the knapsack against all choices, the spread over ranks, its objectives."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import isoload
from isoload.placers.base import make_scenarios
from isoload.placers.craft import CraftPlacer, allocate, assign, make_grid, pick_budget
from isoload.weights.pages import resident_slots
from support.placing import busiest, live_ranks_of


def test_the_knapsack_finds_the_best_of_all_choices():
    rng = np.random.default_rng(0)
    for _ in range(60):
        layers, ranks = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        grid = make_grid(live_ranks_of(ranks, None), 9, str(rng.choice(["powers", "full"])))
        worth = np.concatenate([np.zeros((layers, 1)), rng.random((layers, len(grid) - 1))], axis=1)
        replicas = int(rng.integers(0, layers + 1))
        counts, curve = allocate(worth, grid, ranks, replicas)
        choices = [c for c in itertools.product(range(len(grid)), repeat=layers)]
        fits = [c for c in choices if sum(grid[k] for k in c) <= replicas * ranks]
        most = max(sum(worth[layer, k] for layer, k in enumerate(c)) for c in fits)
        assert sum(worth[layer, grid.index(n)] for layer, n in enumerate(counts)) == pytest.approx(most)
        assert counts.sum() <= replicas * ranks and curve[replicas] == pytest.approx(most)


def test_the_knapsack_spends_nothing_where_replicas_are_worth_nothing():
    worth = np.array([[0, 1.0, 1, 1], [0, -1, -2, -3]])
    assert allocate(worth, [0, 1, 2, 4], 4, 2)[0].tolist() == [1, 0]


def test_budgets_by_the_curve():
    assert pick_budget(np.array([0.0, 3, 8, 9, 9]), "gain") == 2
    assert pick_budget(np.array([0.0, 5, 8, 9, 9]), "gain") == 1
    assert pick_budget(np.array([0.0, 5, 8, 9, 9]), "knee") == 2
    assert pick_budget(np.zeros(4), "knee") == pick_budget(np.zeros(4), "gain") == 0


def test_the_default_is_more_than_the_first_replica_of_a_concave_curve():
    loads = np.random.default_rng(0).lognormal(0, 1.5, (1, 24, 32))
    made = {
        how: isoload.place(loads, isoload.Topology(8), placer="craft", **how_of)
        for how, how_of in (("default", {}), ("gain", {"replicas": "gain"}))
    }
    total = {how: sum(of.provenance["replicas_by_layer"]) // 8 for how, of in made.items()}
    curve = np.array(made["default"].provenance["worth_by_replicas_of_a_rank"])
    assert total == {"default": pick_budget(curve, "knee"), "gain": 1} and total["default"] > 1


def test_slots_are_spread_as_algorithm_3_says():
    rng = np.random.default_rng(1)
    for _ in range(100):
        layers, ranks = int(rng.integers(1, 12)), int(rng.integers(1, 9))
        slots = rng.integers(ranks, 5 * ranks, layers)
        found = assign(slots, ranks)
        assert (found.sum(1) == slots).all()
        assert (found.max(1) - found.min(1) <= 1).all()
        held = found.sum(0)
        assert held.max() - held.min() <= 1
    # CRAFT's figure 7: four layers with 2, 2, 4 and 0 replicas on two nodes of two ranks
    assert (assign(np.array([2, 2, 4, 0]), 4)).tolist() == [
        [1, 0, 0, 1],
        [0, 1, 1, 0],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
    ]


def skewed_layers(rng, batches=4, ranks=8):
    """Layer 0 has one expert of a third of the load, layer 1 is level, layer 2 between them."""
    loads = rng.uniform(90, 110, (batches, 3, 4 * ranks))
    loads[:, 0, 5] *= 16
    loads[:, 2, 7] *= 5
    return loads


def test_replicas_go_where_they_help():
    loads = skewed_layers(np.random.default_rng(2))
    placement = isoload.place(loads, isoload.Topology(8), placer="craft", replicas=1)
    counts = placement.provenance["replicas_by_layer"]
    assert counts[0] == max(counts) and counts[1] == 0 and sum(counts) <= 8
    assert isoload.placement.placement.placement_errors(placement) == []
    held = (placement.slot_to_expert.view(3, 8, -1) >= 0).sum((0, 2))
    assert held.max() - held.min() <= 1 and placement.slots_per_rank == 4 + -(-counts[0] // 8)
    curve = placement.provenance["worth_by_replicas_of_a_rank"]
    assert curve == sorted(curve) and len(curve) == 4


@pytest.mark.parametrize("placer", ["craft", "scenario"])
def test_more_replicas_are_never_worse_and_the_search_beats_packing(placer):
    loads, found = skewed_layers(np.random.default_rng(3)), []
    for replicas in range(4):
        placement = isoload.place(loads, isoload.Topology(8), placer=placer, replicas=replicas)
        found.append(busiest(placement.slot_to_expert.numpy(), loads, 8).sum())
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(found))
    assert found[1] < 0.8 * found[0]


def test_the_printed_objective_gives_few_layers_everything():
    loads = np.random.default_rng(4).lognormal(0, 1, (4, 12, 32))
    scenarios, _ = make_scenarios(loads)
    live_ranks = live_ranks_of(8, None)
    layers = {
        objective: sum(
            n > 0 for n in CraftPlacer(3, objective).place(scenarios, live_ranks).notes["replicas_by_layer"]
        )
        for objective in ("time", "gain", "printed")
    }
    assert layers["printed"] < min(layers["time"], layers["gain"])


def test_gain_is_the_papers_balance_and_time_the_busiest_ranks_load():
    loads = skewed_layers(np.random.default_rng(5))
    scenarios, _ = make_scenarios(loads)
    for objective in ("time", "gain"):
        curves = [CraftPlacer(n, objective).place(scenarios, live_ranks_of(8, None)) for n in (0, 2)]
        peaks = [busiest(p.slots.reshape(3, -1), loads, 8) for p in curves]
        mean = loads.sum(-1) / 8
        worth = [
            -peak.mean(0).sum() if objective == "time" else (mean / peak).mean(0).sum() for peak in peaks
        ]
        curve = curves[0].notes["worth_by_replicas_of_a_rank"]
        assert curve[2] - curve[0] == pytest.approx(worth[1] - worth[0], rel=0.05)


REFUSED = [
    ("replicas must be in 0..2 per rank over all layers, as many as fit, got 3", {"replicas": 3}),
    ("replicas must be in 0..2 per rank over all layers, as many as fit, got -1", {"replicas": -1}),
    ("replicas must be a number per rank, gain or knee, got 'all'", {"replicas": "all"}),
    ("objective must be one of time, gain, printed, got 'best'", {"objective": "best"}),
    ("grid must be one of powers, full, got 'some'", {"grid": "some"}),
    (
        "replicas must be in 0..0 per rank over all layers, as many as fit, got 2",
        {"replicas": 2, "slots_per_rank": 2},
    ),
]


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_craft_names_what_it_refuses(message, options):
    loads = np.random.default_rng(6).lognormal(0, 2, (2, 8))
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.place(loads, isoload.Topology(4), **{"placer": "craft", "replicas": 1, **options})


def test_a_budget_leaves_wider_slots_free():
    loads = np.random.default_rng(7).lognormal(0, 1, (2, 8))
    wide = isoload.place(loads, isoload.Topology(4), 5, "scenario", replicas=1)
    assert wide.slots_per_rank == 5 and (wide.slot_to_expert.view(2, 4, 5)[:, :, 4] == -1).all()


BUDGETED = ("eplb", "craft", "scenario")


def capacities(placement):
    """[L, R] slots with an expert; absent slots come last."""
    table = placement.slot_to_expert
    return resident_slots(table, placement.topology.num_ranks).numpy().astype(np.int32)


@pytest.mark.parametrize("name", BUDGETED)
def test_slots_move_between_layers_within_each_ranks_memory(name):
    """With loads that turn around: every rank keeps its number of slots, and no layer has ranks that gain and lose."""
    draw, moved = np.random.default_rng(11), 0
    for _ in range(8):
        ranks, layers, replicas = (
            int(draw.choice([2, 3, 4])),
            int(draw.integers(2, 6)),
            int(draw.integers(1, 3)),
        )
        loads = draw.lognormal(0, 1.5, (3, layers, 12)) ** draw.choice([0.2, 2], layers)[:, None]
        now = isoload.place(loads, isoload.Topology(ranks), None, name, replicas=replicas)
        start, capacity = capacities(now), capacities(now)
        assert (capacity.sum(0) <= 12 * layers // ranks + replicas).all() and np.ptp(capacity.sum(0)) <= 1
        for turn in range(4):
            options = {"before": now} if name == "scenario" else {}
            changed = loads[:, draw.permutation(layers)] if turn else loads[:, ::-1]
            now = isoload.place(
                changed, ranks, start.max(), name, capacity=capacity, replicas=replicas, **options
            )
            change = capacities(now) - capacity
            assert (capacities(now).sum(0) == start.sum(0)).all() and capacities(now).max() <= start.max()
            assert not ((change > 0).any(1) & (change < 0).any(1)).any()
            moved, capacity = moved + int(change.any()), capacities(now)
    assert moved > 8


@pytest.mark.parametrize("name", ["eplb", "scenario"])
def test_without_a_budget_every_rank_keeps_its_slots_in_every_layer(name):
    loads = np.random.default_rng(3).lognormal(0, 1.5, (4, 3, 8))
    now = isoload.place(loads, isoload.Topology(4), None, "scenario", replicas=1)
    options = {"before": now} if name == "scenario" else {}
    other = isoload.place(loads[:, ::-1], 4, now.slots_per_rank, name, capacity=capacities(now), **options)
    assert (capacities(other) == capacities(now)).all()
    if name == "scenario":  # experts that stay on their rank keep their slots, as far as these have memory
        old, new = (p.slot_to_expert.view(3, 4, -1).numpy() for p in (now, other))
        for a, b in zip(old.reshape(-1, old.shape[2]), new.reshape(-1, old.shape[2]), strict=True):
            assert all(b[i] == e for i, e in enumerate(a) if e >= 0 and e in b)


def test_a_budget_starts_from_a_placement():
    """Most experts stay on their ranks, wherever the budget has put the replicas."""
    loads = np.random.default_rng(5).lognormal(0, 1, (4, 4, 16))
    before = isoload.place(loads, isoload.Topology(4), None, "scenario")
    after = isoload.place(loads, 4, None, "scenario", before=before, replicas=2)
    assert capacities(after).sum() == 4 * 16 + 8
    old, new = (p.slot_to_expert.view(4, 4, -1).numpy() for p in (before, after))
    stays = [
        len(np.intersect1d(a[a >= 0], b))
        for a, b in zip(old.reshape(16, -1), new.reshape(16, -1), strict=True)
    ]
    assert sum(stays) > 0.8 * 4 * 16


def test_eplbs_replicas_go_to_the_hottest_experts_of_all_layers():
    """By a plain loop over experts."""
    loads = np.random.default_rng(8).lognormal(0, 2, (3, 8)).astype(np.float32)
    copies, layers = np.ones((3, 8)), [0, 0, 0]
    for _ in range(4 * 2):
        best = max(
            (loads[i, e] / loads[i].sum() / copies[i, e], -i, -e)
            for i in range(3) for e in range(8) if layers[i] < 4 and copies[i, e] < 4
        )  # fmt: skip
        copies[-best[1], -best[2]] += 1
        layers[-best[1]] += 1
    found = isoload.place(loads, isoload.Topology(4), placer="eplb", replicas=2)
    assert (
        capacities(found).sum(1).tolist() == [8 + n for n in layers] and (capacities(found).sum(0) == 8).all()
    )


REFUSED_CAPACITY = {
    "capacity must be None for placer trivial, which fills every slot": {"placer": "trivial"},
    "capacity must be [2, 4] for these counts and ranks, got [1, 4]": {"capacity": np.full((1, 4), 2)},
    "capacity must be in 0..3 on every rank, got 2..4": {"capacity": [[2] * 4, [2, 2, 2, 4]]},
    "capacity must have a slot for each of the 8 experts, got 7 in layer 1": {
        "capacity": [[2] * 4, [2, 2, 2, 1]]
    },
    "groups must be 0 and dedup True with replicas and where slots differ between layers, got groups=2": {
        "groups": 2
    },
    "pinned must be False with before where slots move between layers, got True": {
        "placer": "scenario", "pinned": True, "before": isoload.place(np.ones((2, 8)), 4, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_CAPACITY)
def test_a_capacity_that_cannot_be_is_refused(message):
    call = {"placer": "eplb", "capacity": np.full((2, 4), 2), **REFUSED_CAPACITY[message]}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.place(np.ones((2, 8)), isoload.Topology(4), 3, **call)
