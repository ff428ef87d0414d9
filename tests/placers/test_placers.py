"""Offline placers: the published maps, what dedup promises, and what place() adds or refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import isoload
from isoload.placers import compiled
from isoload.placers.eplb import EplbPlacer
from reference import place_eplb
from support.placing import placed
from support.sweeps import slow

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "eplb_maps.npz")
GROUPED = np.load(Path(__file__).parents[1] / "golden" / "eplb_groups.npz")
CASES = sorted({name.split("/")[0] for name in GOLDEN.files})

OF_COUNTS = [name for name in isoload.PLACERS if name != "grace"]  # which takes per-token traces


def golden(case: str) -> tuple[np.ndarray, int, int]:
    """loads [1, L, E], R, S"""
    num_slots, _, _, ranks = GOLDEN[f"{case}/settings"].tolist()
    return GOLDEN[f"{case}/weight"].astype(np.float64)[None], ranks, num_slots // ranks


def copies(slots: np.ndarray, experts: int) -> np.ndarray:
    """[L, E] replicas of every expert."""
    return np.stack([np.bincount(row, minlength=experts) for row in slots])


def imbalance(slots: np.ndarray, loads: np.ndarray, ranks: int) -> np.ndarray:
    """[L] max/mean rank load if every expert's load is spread evenly over its replicas."""
    part = loads.sum(0) / copies(slots, loads.shape[-1])
    per_rank = np.take_along_axis(part, slots.astype(np.int64), 1).reshape(len(slots), ranks, -1).sum(-1)
    return per_rank.max(1) / per_rank.mean(1)


def repeats(slots: np.ndarray, ranks: int) -> int:
    """How many slots repeat an expert of their own rank."""
    per_rank = slots.reshape(len(slots) * ranks, -1)
    return sum(len(row) - len(set(row)) for row in per_rank.tolist())


def plain_replicate(loads: np.ndarray, num_replicas: int, most: int) -> tuple[list[int], list[np.float32]]:
    """One layer in plain loops, in float32: expert of each replica, load of one replica of each expert."""
    count, replicas = [1] * len(loads), list(range(len(loads)))

    def part(expert):
        return np.float32(loads[expert]) / np.float32(count[expert])

    while len(replicas) < num_replicas:
        heaviest = max((e for e in range(len(loads)) if count[e] < most), key=lambda e: (part(e), -e))
        count[heaviest] += 1
        replicas.append(heaviest)
    return replicas, [part(e) for e in range(len(loads))]


def plain_pack(replicas: list[int], part: list[np.float32], ranks: int, dedup: bool) -> list[int]:
    """One layer in plain loops: expert in each slot."""
    size = len(replicas) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [np.float32(0)] * ranks
    for expert in sorted(replicas, key=lambda e: -part[e]):
        fits = [r for r in range(ranks) if len(held[r]) < size and not (dedup and expert in held[r])]
        if not fits:
            moves = []
            for giver in (r for r in range(ranks) if expert not in held[r]):
                for place, other in enumerate(held[giver]):
                    for taker in range(ranks):
                        if len(held[taker]) < size and other not in held[taker]:
                            gives = total[giver] - part[other] + part[expert]
                            moves.append((max(gives, total[taker] + part[other]), giver, place, taker))
            _, giver, place, taker = min(moves)
            other = held[giver].pop(place)
            held[taker].append(other)
            total[giver] -= part[other]
            total[taker] += part[other]
            fits = [giver]
        rank = min(fits, key=lambda r: (total[r], r))
        held[rank].append(expert)
        total[rank] += part[expert]
    return [expert for rank in held for expert in rank]


@pytest.mark.parametrize("case", CASES)
def test_without_dedup_maps_equal_the_published_ones(case):
    loads, ranks, size = golden(case)
    slots = placed(EplbPlacer(dedup=False), loads, ranks, size)
    assert slots.dtype == np.int32
    np.testing.assert_array_equal(slots, GOLDEN[f"{case}/phy2log"])
    np.testing.assert_array_equal(copies(slots, loads.shape[-1]), GOLDEN[f"{case}/logcnt"])


@pytest.mark.parametrize("case", ["readme", "random1", "random6"])
def test_with_groups_maps_equal_the_published_hierarchical_ones(case):
    num_slots, groups, nodes, ranks = (int(n) for n in GROUPED[f"{case}/settings"])
    loads = GROUPED[f"{case}/weight"].astype(np.float64)[None]
    placer = EplbPlacer(dedup=False, groups=groups)
    slots = placed(placer, loads, ranks, num_slots // ranks, nodes=nodes)
    np.testing.assert_array_equal(slots, GROUPED[f"{case}/phy2log"])
    np.testing.assert_array_equal(copies(slots, loads.shape[-1]), GROUPED[f"{case}/logcnt"])
    flat = placed(EplbPlacer(dedup=False), loads, ranks, num_slots // ranks, nodes=nodes)
    assert (flat != slots).any(1).all(), "a case that does not show the policy"


def test_golden_cases_cover_the_special_ones():
    shapes = {case: golden(case) for case in CASES}
    assert any(size == 1 for _, _, size in shapes.values())
    assert any(loads.shape[-1] == ranks * size for loads, ranks, size in shapes.values())
    assert any((loads == 0).all(-1).any() for loads, _, _ in shapes.values())
    assert any(GOLDEN[f"{case}/settings"][1] % GOLDEN[f"{case}/settings"][2] for case in CASES)
    assert any(repeats(GOLDEN[f"{case}/phy2log"], shapes[case][1]) for case in CASES)
    for case in CASES:  # all mean the global policy
        _, groups, nodes, _ = GOLDEN[f"{case}/settings"].tolist()
        assert groups == nodes == 1 or groups % nodes


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("zero")])
def test_dedup_costs_next_to_no_balance_on_golden_loads(case):
    loads, ranks, size = golden(case)
    published, distinct = GOLDEN[f"{case}/phy2log"], placed(EplbPlacer(), loads, ranks, size)
    assert repeats(distinct, ranks) == 0
    assert (imbalance(distinct, loads, ranks) <= 1.005 * imbalance(published, loads, ranks)).all()


@pytest.mark.parametrize("number", [75, *slow(300)])
@pytest.mark.parametrize("dedup", [False, True])
def test_random_loads_equal_plain_loops(dedup, number):
    rng = np.random.default_rng(11)
    for _ in range(number):
        ranks, size = rng.integers(1, 7, 2).tolist()
        experts = int(rng.integers(size, ranks * size + 1))
        top = int(rng.choice([1, 4, 40, 10**6]))
        loads = rng.integers(0, top + 1, (2, 3, experts)).astype(np.float64)
        slots = placed(EplbPlacer(dedup), loads, ranks, size)
        for layer, row in zip(loads.sum(0), slots.tolist(), strict=True):
            replicas, part = plain_replicate(layer, ranks * size, ranks if dedup else ranks * size)
            expected = replicas if size == 1 else plain_pack(replicas, part, ranks, dedup)
            assert row == expected, f"R={ranks} S={size} loads={layer.tolist()}"


@pytest.mark.parametrize("number", [500, *slow(2000)])
def test_packing_that_gets_stuck_often_equals_plain_loops(monkeypatch, number):
    """Replica counts that greedy replication would not choose: packing them gets stuck again and again."""
    stuck = []
    real = place_eplb.make_room
    monkeypatch.setattr(place_eplb, "make_room", lambda *a: stuck.append(a) or real(*a))
    rng, most = np.random.default_rng(12), 0
    for _ in range(number):
        ranks, size = int(rng.integers(2, 7)), int(rng.integers(3, 7))
        # Every rank is given distinct experts, so a packing without repeats exists.
        experts = size + int(rng.integers(0, 4))
        replicas = np.concatenate([rng.permutation(experts)[:size] for _ in range(ranks)])[None]
        # Some far heavier than the rest: their ranks fill last, when only repeats are left.
        part = np.floor(10 ** rng.uniform(0, rng.choice([1, 3]), (1, experts))).astype(np.float32)
        before = len(stuck)
        capacity = np.full((1, ranks), size, dtype=np.int32)
        slots = place_eplb.pack(replicas, part, capacity, True, size).reshape(1, -1)
        most = max(most, len(stuck) - before)
        assert repeats(slots, ranks) == 0
        assert slots[0].tolist() == plain_pack(replicas[0].tolist(), list(part[0]), ranks, dedup=True)
    assert len(stuck) > 10 and most > 1


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_dedup_properties(data):
    ranks, size = data.draw(st.integers(1, 8), "ranks"), data.draw(st.integers(1, 7), "size")
    experts = data.draw(st.integers(size, ranks * size), "experts")
    hot = st.sampled_from([0, 0, 1, 2, 900])
    layer = st.lists(hot | st.integers(0, 30), min_size=experts, max_size=experts)
    counts = np.array(data.draw(st.lists(layer, min_size=1, max_size=3), "counts"))
    placement = isoload.place(counts, isoload.Topology(ranks), size)
    assert isoload.placement.placement.placement_errors(placement) == []
    slots = placement.slot_to_expert.numpy()
    assert (slots >= 0).all() and repeats(slots, ranks) == 0
    count = copies(slots, experts)
    assert (count >= 1).all() and (count <= ranks).all()
    # No other counts make the heaviest replica lighter: they would need more slots or ranks than there are.
    for load, n in zip(counts.tolist(), count.tolist(), strict=True):
        top, most = max(((a, b) for a, b in zip(load, n, strict=True)), key=lambda pair: pair[0] / pair[1])
        needed = [max(1, a * most // top + 1) if top else ranks + 1 for a in load]
        assert sum(needed) > ranks * size or max(needed) > ranks


def test_one_hot_expert_gets_a_replica_on_every_rank_and_no_more():
    loads = np.zeros((1, 1, 12))
    loads[0, 0, 4] = 1000
    distinct, published = placed(EplbPlacer(), loads, 6, 3), placed(EplbPlacer(dedup=False), loads, 6, 3)
    assert copies(distinct, 12)[0].tolist() == [2, 1, 1, 1, 6, 1, 1, 1, 1, 1, 1, 1]
    assert copies(published, 12)[0, 4] == 7


def test_stuck_packing_is_repaired_by_the_mildest_move():
    """Expert 3's second replica finds room only where the first is, on rank 1: rank 0 gives expert 0 away."""
    loads = np.array([[[4.0, 8, 4, 6]]])
    assert placed(EplbPlacer(), loads, 2, 3).tolist() == [[2, 1, 3, 1, 3, 0]]
    assert repeats(placed(EplbPlacer(dedup=False), loads, 2, 3), 2) == 1


@pytest.mark.parametrize("number", [100, *slow(400)])
@pytest.mark.parametrize("dedup", [False, True])
def test_compiled_loops_and_numpy_give_the_same_slots(dedup, number):
    rng = np.random.default_rng(13)
    for _ in range(number):
        ranks, size = rng.integers(1, 9, 2).tolist()
        experts = int(rng.integers(size, ranks * size + 1))
        weight = np.floor(10 ** rng.uniform(0, rng.choice([0.5, 3]), (3, experts))).astype(np.float32)
        capacity = np.full((3, ranks), size, dtype=np.int32)
        if experts < ranks * size - ranks:  # ragged: fewer slots on some ranks of one layer
            capacity[1, : rng.integers(0, ranks)] -= 1
        fast = compiled.pack_slots(weight, capacity, dedup, int(rng.integers(1, 4)))
        np.testing.assert_array_equal(fast, place_eplb.place_eplb(weight, capacity, dedup))
        assert ((fast >= 0).sum(-1) == capacity).all()


@pytest.mark.parametrize(
    "placer", [name for name in OF_COUNTS if name != "craft"]
)  # whose layers share a budget
def test_layers_are_placed_independently_and_batches_summed(placer):
    counts = np.random.default_rng(5).integers(0, 1000, (4, 6, 20))
    topology = isoload.Topology(4)
    whole = isoload.place(counts, topology, 7, placer).slot_to_expert
    summed = isoload.place(counts.sum(0), topology, 7, placer).slot_to_expert
    assert torch.equal(whole, summed) == (placer != "scenario")
    for i in range(6):
        alone = isoload.place(counts[:, i : i + 1], topology, 7, placer).slot_to_expert
        assert torch.equal(alone[0], whole[i])


def test_trivial_lays_experts_in_order_then_repeats_from_the_first():
    slots = isoload.place(np.ones((2, 6)), isoload.Topology(4), 2, placer="trivial").slot_to_expert
    assert slots.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 2


@pytest.mark.parametrize("placer", OF_COUNTS)
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_spare_slots_stay_empty_and_the_rest_is_placed_as_without(placer, spare):
    counts = np.random.default_rng(7).integers(0, 1000, (3, 20))
    topology = isoload.Topology(5)
    placement = isoload.place(counts, topology, 5 + spare, placer, spare_slots=spare)
    per_rank = placement.slot_to_expert.view(3, 5, 5 + spare)
    dense = isoload.place(counts, topology, 5, placer).slot_to_expert
    assert placement.spare_slots == spare
    assert torch.equal(per_rank[:, :, :5].flatten(1), dense)
    assert (per_rank[:, :, 5:] == -1).all()


@pytest.mark.parametrize("placer", OF_COUNTS)
def test_dead_ranks_get_nothing_and_live_ones_what_a_smaller_group_gets(placer):
    counts = np.random.default_rng(9).integers(0, 1000, (3, 10))
    topology = isoload.Topology(6, alive=[True, False, True, True, False, True])
    placement = isoload.place(counts, topology, 5, placer, spare_slots=1)
    per_rank = placement.slot_to_expert.view(3, 6, 5)
    assert (per_rank[:, [1, 4]] == -1).all()
    smaller = isoload.place(counts, isoload.Topology(4), 5, placer, spare_slots=1)
    assert torch.equal(per_rank[:, [0, 2, 3, 5]].flatten(1), smaller.slot_to_expert)


def test_default_is_one_slot_for_each_expert_and_the_spare_slots():
    placement = isoload.place(np.ones((1, 10)), isoload.Topology(4), spare_slots=2)
    assert placement.slots_per_rank == 5
    assert isoload.place(np.ones((1, 8)), isoload.Topology(4)).slots_per_rank == 2


def test_counts_may_be_arrays_tensors_or_lists_of_any_number_type():
    counts = np.random.default_rng(3).integers(0, 200, (2, 3, 8))
    topology = isoload.Topology(4)
    expected = isoload.place(counts, topology, 3).slot_to_expert
    same = [counts.tolist(), counts.astype(np.int32), counts.astype(np.float32), torch.from_numpy(counts)]
    same += [torch.from_numpy(counts).to(torch.bfloat16), torch.from_numpy(counts).float().requires_grad_()]
    for variant in same:
        assert torch.equal(isoload.place(variant, topology, 3).slot_to_expert, expected)


def test_placing_leaves_counts_as_they_were():
    counts = np.random.default_rng(4).integers(0, 200, (2, 3, 8)).astype(np.float64)
    before = counts.copy()
    isoload.place(counts, isoload.Topology(4), 3)
    np.testing.assert_array_equal(counts, before)


SHAPE = "counts must be [L, E] or [batches, L, E] and not empty, got "
RANGE = "counts must be at least 0 and below 2^63, got "
REFUSED = [
    (SHAPE + "[8]", {"counts": np.ones(8)}),
    (SHAPE + "[0, 1, 8]", {"counts": np.ones((0, 1, 8))}),
    (SHAPE + "[1, 1, 1, 8]", {"counts": np.ones((1, 1, 1, 8))}),
    ("counts must be numeric, got list (", {"counts": [["a", "b"]]}),
    (RANGE + "-3", {"counts": [[1, -3]]}),
    (RANGE + "nan", {"counts": [[1, float("nan")]]}),
    (RANGE + "inf", {"counts": [[1, float("inf")]]}),
    (RANGE + "9.22337e+18", {"counts": [[1, 2**63]]}),
    ("spare_slots must be at least 0, got -1", {"spare_slots": -1}),
    ("spare_slots must be at most 8, got 9", {"spare_slots": 9}),
    ("num_shared must be at most 64, got 65", {"num_shared": 65}),
    (
        "slots_per_rank must be at most 16384 (65536 slots on all of 4 ranks), got 1000000",
        {"slots_per_rank": 1000000, "placer": "trivial"},
    ),
    (
        "slots_per_rank must be at least 4 for 8 experts on 4 live ranks with 2 spare and 0 shared slots, got 3",
        {"slots_per_rank": 3, "spare_slots": 2},
    ),
    (
        "slots_per_rank must be at most 8 without spare slots, one for each expert "
        "(dedup=False repeats experts), got 9",
        {"slots_per_rank": 10, "spare_slots": 1},
    ),
    (f"placer must be one of {', '.join(isoload.PLACERS)}, got 'best'", {"placer": "best"}),
    ("option must be one of dedup, groups, replicas for placer eplb, got 'seed'", {"seed": 1}),
    ("option must be one of (none) for placer trivial, got 'dedup'", {"placer": "trivial", "dedup": True}),
]


@pytest.mark.parametrize(("message", "arguments"), REFUSED)
def test_place_names_what_it_refuses(message, arguments):
    call = {"counts": np.ones((1, 8)), "topology": isoload.Topology(4), **arguments}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.place(**call)


def test_more_slots_than_distinct_replicas_are_filled_without_dedup():
    placement = isoload.place(np.ones((1, 2)), isoload.Topology(2), 3, dedup=False)
    assert copies(placement.slot_to_expert.numpy(), 2).sum() == 6


def scenario_call(**changes):
    """Two layers of six experts on three ranks of three slots, with something changed."""
    slots = np.array([[[0, 1, 2], [3, 4, 5], [0, 1, -1]]] * 2)
    given = {
        "loads": np.ones((2, 6, 4)), "weight": np.ones(4), "tick": np.ones(3), "node": np.zeros(3, int),
        "home": np.full((2, 6), -1), "capacity": np.full((2, 3), 3), "risks": np.ones((1, 2, 6)), "rival": None,
        "before": slots, "width": 3, "exact": False, "few_slots": False, "steps": 4, "moves": -1, "threads": 1,
    }  # fmt: skip
    return given | changes


def with_slot(value, rank=0, slot=0):
    slots = scenario_call()["before"].copy()
    slots[1, rank, slot] = value
    return slots


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"loads": np.ones((2, 6, 3))}, "loads must be [L, E, n], n a multiple of 4"),
        ({"weight": np.ones(3)}, "weight must be [4]"),
        ({"node": np.zeros(2)}, "node must be [3]"),
        ({"home": np.zeros((2, 5))}, "home must be [2, 6]"),
        ({"risks": np.ones((1, 2, 5))}, "risks must be [1, 2, 6]"),
        ({"risks": np.ones((0, 2, 6)), "before": None}, "risks must be given without before"),
        ({"capacity": np.full((1, 3), 3)}, "capacity must be [2, 3]"),
        ({"capacity": np.full((2, 3), 4)}, "capacity must be in 0..3 on every rank"),
        ({"capacity": np.full((2, 3), -1)}, "capacity must be in 0..3 on every rank"),
        ({"capacity": np.full((2, 3), 1)}, "capacity must hold all 6 experts"),
        ({"before": np.zeros((2, 3, 4))}, "before must be [2, 3, 3]"),
        ({"before": with_slot(6)}, "before must have experts within capacity, none twice"),
        ({"before": with_slot(-2)}, "before must have experts within capacity, none twice"),
        ({"before": with_slot(2)}, "before must have experts within capacity, none twice"),
        ({"rival": with_slot(2), "before": None}, "rival must have experts within capacity, none twice"),
        ({"capacity": np.full((2, 3), 2)}, "before must have experts within capacity, none twice"),
    ],
)
def test_loops_refuse_what_would_not_stay_in_memory(changes, rule):
    assert compiled.search_slots(**scenario_call())[0].shape == (2, 3, 3)
    with pytest.raises(ValueError, match="^" + re.escape(rule)):
        compiled.search_slots(**scenario_call(**changes))


@pytest.mark.parametrize(
    ("weight", "capacity", "rule"),
    [
        (np.ones(6), np.full((2, 3), 2), "weight must be [L, E] and capacity [L, R]"),
        (np.ones((1, 6)), np.full((2, 3), 2), "capacity must be [1, 3]"),
        (np.ones((2, 6)), np.full((2, 3), 7), "capacity must be in 0..6 on every rank"),
        (np.ones((2, 6)), np.full((2, 3), 1), "capacity must hold all 6 experts"),
    ],
)
def test_loops_of_eplb_refuse_likewise(weight, capacity, rule):
    with pytest.raises(ValueError, match="^" + re.escape(rule)):
        compiled.pack_slots(weight, capacity, True, 1)
