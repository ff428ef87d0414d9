"""Placer topology: its graphs, which experts are replicated along which edge, and what it refuses."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

import isoload
from isoload.placers.graph import GRAPHS, GraphPlacer, owners_of
from support.placing import placed

SIZES = {"ring": (5, 8), "cube": (8, 8), "hypercube": (16, 8), "torus": (12, 4)}  # ranks, ranks per node


def edges(graph: str, ranks: int, per_node: int) -> list[tuple[int, int]]:
    """(owner, holder) of every edge."""
    owners = owners_of(graph, ranks, per_node)
    return [(owner, rank) for rank, found in enumerate(owners) for owner in found]


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_rank_takes_from_as_many_as_it_gives_to(graph: str) -> None:
    ranks, per_node = SIZES[graph]
    found = edges(graph, ranks, per_node)
    degree = 1 if graph == "ring" else 2
    assert all(owner != rank for owner, rank in found)
    assert set(Counter(owner for owner, _ in found).values()) == {degree}
    assert set(Counter(rank for _, rank in found).values()) == {degree}


def test_cube_is_twelve_edges_and_four_diagonals() -> None:
    found = {frozenset(edge) for edge in edges("cube", 8, 8)}
    flips = Counter(a ^ b for a, b in map(sorted, found))
    assert len(found) == 16 and flips == {1: 4, 2: 4, 4: 4, 7: 4}


def test_hypercube_is_the_graph_of_single_bits() -> None:
    found = {frozenset(edge) for edge in edges("hypercube", 16, 8)}
    flips = Counter(a ^ b for a, b in map(sorted, found))
    assert len(found) == 32 and flips == {1: 8, 2: 8, 4: 8, 8: 8}


def test_torus_takes_from_its_node_and_from_the_same_rank_of_another() -> None:
    owners = owners_of("torus", 12, 4)
    assert owners[5] == [4, 1] and owners[4] == [7, 0] and owners[0] == [3, 8]
    for rank, (near, far) in enumerate(owners):
        assert near // 4 == rank // 4 and far // 4 != rank // 4 and far % 4 == rank % 4
    assert owners_of("torus", 4, 2)[0] == [1, 2]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("graph", GRAPHS)
def test_replicas_are_the_heaviest_of_the_neighbours(graph: str, packed: bool) -> None:
    ranks, per_node = SIZES[graph]
    degree, rng = 1 if graph == "ring" else 2, np.random.default_rng(7)
    own, rounds = 6, 2
    counts = rng.integers(0, 50, (3, 4, ranks * own))
    placer = GraphPlacer(graph, per_node, packed)
    slots = placed(placer, counts.astype(float), ranks, own + degree * rounds)
    assert slots.shape == (4, ranks * (own + degree * rounds)) and slots.dtype == np.int32
    owners = owners_of(graph, ranks, per_node)
    for layer, load in zip(slots.reshape(4, ranks, -1), counts.sum(0), strict=True):
        homes = layer[:, :own]
        assert sorted(homes.ravel().tolist()) == list(range(ranks * own))
        assert packed or (homes.ravel() == np.arange(ranks * own)).all()
        assert np.unique(layer, return_counts=True)[1].max() == 2
        for rank in range(ranks):
            for i, expert in enumerate(layer[rank, own:]):
                assert expert in homes[owners[rank][i % degree]]
        for owner in range(ranks):
            given = [e for rank in range(ranks) for e in layer[rank, own:] if e in homes[owner]]
            heaviest = sorted(homes[owner], key=lambda e: (-load[e], e))[: degree * rounds]
            assert sorted(given) == sorted(heaviest)


def test_the_first_edge_of_a_round_has_the_heaviest() -> None:
    """Torus of 2 x 2 with 2 experts each: first every node neighbour takes the heaviest, then the other."""
    counts = np.array([[[1.0, 9, 8, 8, 3, 2, 0, 5]]])
    slots = placed(GraphPlacer("torus", 2), counts, 4, 4).reshape(4, 4)
    assert slots[:, 2].tolist() == [2, 1, 7, 4]
    assert slots[:, 3].tolist() == [5, 6, 0, 3]


def test_packed_levels_the_ranks_before_replication() -> None:
    counts = np.arange(1.0, 17)[::-1][None, None]
    plain, packed = (placed(GraphPlacer("cube", packed=p), counts, 8, 2).reshape(8, 2) for p in (False, True))
    assert plain.tolist() == np.arange(16).reshape(8, 2).tolist()
    assert {float(counts[0, 0][row].sum()) for row in packed} == {17.0}


@pytest.mark.parametrize("packed", [False, True])
def test_experts_that_do_not_divide_leave_some_ranks_one_more_replica(packed: bool) -> None:
    counts = np.random.default_rng(3).integers(1, 99, (1, 5, 10))
    slots = placed(GraphPlacer(packed=packed), counts.astype(float), 4, 4)
    for row in slots:
        copies = np.bincount(row, minlength=10)
        assert copies.min() == 1 and copies.max() == 2 and copies.sum() == 16
    assert (
        isoload.placement.placement.placement_errors(isoload.place(counts, isoload.Topology(4), 4, "graph"))
        == []
    )


def test_no_further_slots_means_no_replicas() -> None:
    slots = isoload.place(np.ones((1, 16)), isoload.Topology(8), placer="graph", graph="cube")
    assert slots.slot_to_expert.tolist() == [list(range(16))]


TORUS = "num_ranks must be 2 or more nodes of ranks_per_node={} (2 or more) for graph torus, got {}"
REFUSED = [
    ("graph must be one of ring, cube, hypercube, torus, got 'star'", 8, 3, {"graph": "star"}),
    ("num_ranks must be at least 2 for graph ring, got 1", 1, 16, {}),
    ("num_ranks must be 8 for graph cube, got 4", 4, 6, {"graph": "cube"}),
    ("num_ranks must be 16 for graph hypercube, got 8", 8, 4, {"graph": "hypercube"}),
    (TORUS.format(8, 8), 8, 4, {"graph": "torus"}),
    (TORUS.format(3, 8), 8, 4, {"graph": "torus", "ranks_per_node": 3}),
    (TORUS.format(1, 8), 8, 4, {"graph": "torus", "ranks_per_node": 1}),
    (
        "slots_per_rank without spare slots must leave no rank more replicas to give than experts, "
        "got 5: rank 7 has 2",
        8,
        5,
        {"graph": "ring"},
    ),
]


@pytest.mark.parametrize(("message", "ranks", "slots", "options"), REFUSED)
def test_refuses(message: str, ranks: int, slots: int, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.place(np.ones((1, 16)), isoload.Topology(ranks), slots, "graph", **options)
