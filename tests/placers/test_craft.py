"""Placer craft and budgets of replicas: the knapsack against all choices, the spread over ranks, its objectives."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import isoload
from isoload.placers.base import make_scenarios
from isoload.placers.craft import CraftPlacer, allocate, assign, make_grid, pick_budget
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


def test_a_budget_with_before_is_refused_and_wider_slots_stay_free():
    loads = np.random.default_rng(7).lognormal(0, 1, (2, 8))
    before = isoload.place(loads, isoload.Topology(4), 3)
    with pytest.raises(ValueError, match="^replicas must be None with before"):
        isoload.place(loads, isoload.Topology(4), 3, "scenario", before=before, replicas=1)
    wide = isoload.place(loads, isoload.Topology(4), 5, "scenario", replicas=1)
    assert wide.slots_per_rank == 5 and (wide.slot_to_expert.view(2, 4, 5)[:, :, 4] == -1).all()
