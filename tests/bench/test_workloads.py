"""Workloads: the imbalance that is asked for is there, to the copy, in tokens of distinct experts."""

import hashlib
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import torch

import isoload
from support.made_routing import all_ids, close, make, total_tokens
from workloads import W0_TO_W7, WORKLOADS, make_workload

# R, E, K, tokens per rank
SHAPES = [
    (1, 1, 1, 5),
    (1, 8, 8, 3),
    (2, 4, 2, 7),
    (2, 3, 1, 1),
    (3, 10, 3, 33),
    (4, 5, 1, 11),
    (4, 24, 4, 0),
    (5, 37, 4, 101),
    (7, 21, 3, (0, 5, 0, 1, 2, 90, 0)),
    (8, 64, 6, 64),
    (64, 256, 8, 9),
]
ROOMY = [(4, 24, 3, 50), (2, 8, 1, 31), (8, 64, 6, 11), (3, 36, 5, (0, 77, 1)), (16, 256, 8, 40)]


def rank_loads(workload, step):
    """[R] copies per rank if the experts lie in order, ceil(E / R) on each."""
    per_rank = ceil(workload.num_experts / workload.num_ranks)
    loads = np.zeros(workload.num_ranks, dtype=np.int64)
    np.add.at(loads, np.arange(workload.num_experts) // per_rank, workload.expert_loads(step))
    return loads


def options_for(name, shape):
    """Options that every shape which can have the workload at all can have."""
    if name in ("zipf", "drift", "lognormal"):
        return {"clip": True}
    if name == "maxvio":
        return {"maxvio": min(1.0, shape[1] / shape[2] - 1)}
    return {"num_hot": 1} if name == "concentrated" else {}


def is_possible(name, shape):
    ranks, experts, top_k, tokens = shape
    if name == "ragged_source":
        return ranks > 1 and isinstance(tokens, int)
    if name == "zero_expert_rank":
        return experts - ceil(experts / ranks) >= top_k
    return name != "concentrated" or experts > top_k


# All workloads


def test_the_registry_has_w0_to_w7_in_their_order():
    assert W0_TO_W7 == (
        "balanced", "hot_experts", "hot_rank", "spread", "ragged_source", "zero_expert_rank",
        "rotating_hotspot", "burst",
    )  # fmt: skip
    assert set(WORKLOADS) - set(W0_TO_W7) == {"zipf", "drift", "lognormal", "maxvio", "concentrated"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WORKLOADS)
def test_tokens_of_distinct_experts_meet_the_expert_loads(name, shape):
    if not is_possible(name, shape):
        with pytest.raises(ValueError, match="must"):
            make(name, shape, **options_for(name, shape))
        return
    workload = make(name, shape, seed=3, **options_for(name, shape))
    for step in (0, 1, 7):
        per_rank, tokens = workload.topk_ids(step), workload.tokens(step)
        assert [tuple(ids.shape) for ids in per_rank] == [(t, shape[2]) for t in tokens]
        assert sum(tokens) == total_tokens(shape)
        if name != "ragged_source":
            assert tokens == (list(shape[3]) if isinstance(shape[3], tuple) else [shape[3]] * shape[0])
        assert all(ids.dtype == torch.int64 and ids.is_contiguous() for ids in per_rank)
        assert (np.diff(np.sort(all_ids(workload, step)), axis=1) > 0).all()
        counted = sum(isoload.count(ids, shape[1]) for ids in per_rank)
        assert counted.tolist() == workload.expert_loads(step).tolist()


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_and_step_give_the_same_tokens_in_any_order(name):
    shape = (4, 24, 3, 50)
    workload = make(name, shape, seed=5)
    tokens = {step: all_ids(workload, step) for step in (6, 0, 3)}
    again = make(name, shape, seed=5)
    for step in (0, 3, 6):
        np.testing.assert_array_equal(all_ids(again, step), tokens[step])
    assert not np.array_equal(tokens[0], tokens[3])
    assert not np.array_equal(tokens[0], all_ids(make(name, shape, seed=6), 0))
    assert again == workload and hash(again) == hash(workload)


def test_the_tokens_are_these_on_every_machine():
    digest = hashlib.sha256()
    for name in WORKLOADS:
        digest.update(all_ids(make(name, (4, 24, 3, 50), seed=1), 7).tobytes())
    assert digest.hexdigest()[:16] == "5d1243f1d8967bad"


@pytest.mark.parametrize("name", W0_TO_W7)
def test_a_workload_feeds_the_pipeline(name):
    ranks, experts, k = 4, 16, 3
    topology = isoload.Topology(ranks)
    slots = torch.arange(ranks * 6, dtype=torch.int32)[None] % experts
    placement = isoload.Placement(slots, topology, experts)
    per_rank = make(name, (ranks, experts, k, 40)).topk_ids(7)
    loads = torch.stack([isoload.count(ids, experts) for ids in per_rank])
    plan = isoload.plan(loads, placement, 0)
    got = torch.zeros_like(plan.quota)
    for rank, ids in enumerate(per_rank):
        routed = isoload.route(ids, loads, plan, rank)
        got += torch.bincount(routed.flatten(), minlength=len(got)).int()
    assert got.tolist() == plan.quota.tolist()


# W0-W7


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_balanced_experts_and_ranks_differ_by_one_copy_at_most(shape):
    workload = make("balanced", shape)
    loads = workload.expert_loads(0)
    assert loads.max() - loads.min() <= 1
    if shape[1] % shape[0] == 0:
        assert close(rank_loads(workload, 0), [Fraction(total_tokens(shape) * shape[2], shape[0])] * shape[0])


@pytest.mark.parametrize("heat", [1, 1.15, 1.5, 2, "most"])
@pytest.mark.parametrize("shape", ROOMY, ids=str)
@pytest.mark.parametrize("name", ["hot_experts", "hot_rank", "spread", "rotating_hotspot", "burst"])
def test_hot_experts_have_heat_times_the_mean_load(name, shape, heat):
    ranks, experts, top_k, _ = shape
    num_hot = experts // ranks
    most = Fraction(experts, max(top_k, num_hot))
    workload = make(name, shape, heat=float(most) if heat == "most" else heat, seed=4)
    exact = most if heat == "most" else Fraction(heat)
    copies, step = total_tokens(shape) * top_k, 7
    loads = workload.expert_loads(step)
    hot = np.isin(np.arange(experts), workload.hot_set(step))
    assert hot.sum() == num_hot
    if exact > 1:  # else nothing sets them apart
        assert abs(int(loads[hot].sum()) - exact * num_hot * copies / experts) <= Fraction(1, 2)
    assert close(loads[hot], [exact * copies / experts] * num_hot)
    cold = (experts - exact * num_hot) / (experts - num_hot) * copies / experts
    assert close(loads[~hot], [cold] * (experts - num_hot))


@pytest.mark.parametrize("shape", ROOMY, ids=str)
def test_the_heat_of_a_hot_rank_is_its_imbalance(shape):
    ranks, experts, top_k, _ = shape
    workload = make("hot_rank", shape, heat=1.5, rank=ranks - 1)
    mean = Fraction(total_tokens(shape) * top_k, ranks)
    loads = rank_loads(workload, 0)
    assert loads.argmax() == ranks - 1 and abs(int(loads[-1]) - Fraction(3, 2) * mean) <= Fraction(1, 2)
    assert close(loads[:-1], [mean * (ranks - Fraction(3, 2)) / (ranks - 1)] * (ranks - 1))


def test_heat_is_two_or_the_most_possible_unless_given():
    assert make("hot_rank", (4, 8, 2, 12)).expert_loads(0).tolist() == [24, 24, 8, 8, 8, 8, 8, 8]
    assert make("hot_rank", (4, 6, 4, 6)).expert_loads(0).tolist() == [24, 24, 12, 12, 12, 12]
    assert make("hot_rank", (1, 6, 4, 24)).expert_loads(0).tolist() == [16] * 6


def test_hot_experts_lie_anywhere_and_as_many_as_asked():
    sets = [frozenset(make("hot_experts", (4, 32, 2, 9), seed=s, num_hot=5).hot_set(0)) for s in range(60)]
    assert all(len(hot) == 5 for hot in sets) and len(set(sets)) > 50
    assert set().union(*sets) == set(range(32))


@pytest.mark.parametrize(("ranks", "num_hot"), [(4, 3), (4, 4), (8, 11), (2, 1)])
def test_spread_gives_every_rank_its_part_of_the_hot_experts(ranks, num_hot):
    workload = make("spread", (ranks, 32, 2, 9), num_hot=num_hot)
    held = np.bincount(np.array(workload.hot_set(0)) // (32 // ranks), minlength=ranks)
    assert held.sum() == num_hot and held.max() - held.min() <= 1


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 7), (3, 12), (5, 101), (8, 64), (16, 1)])
def test_ragged_sources_stand_on_equal_steps_from_empty_to_twice_the_mean(ranks, tokens):
    workload = make("ragged_source", (ranks, 12, 3, tokens), seed=2)
    seen = [workload.tokens(step) for step in range(90)]
    for step in seen:
        assert sum(step) == ranks * tokens and 0 in step
        assert close(sorted(step), [Fraction(2 * tokens * i, ranks - 1) for i in range(ranks)])
    assert {step.index(0) for step in seen} == set(range(ranks)) or ranks > 8
    loads = workload.expert_loads(0)
    assert loads.max() - loads.min() <= 1


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_zero_expert_rank_gets_nothing_and_the_others_the_same(rank):
    loads = make("zero_expert_rank", (4, 15, 3, 50), rank=rank).expert_loads(0)  # 4, 4, 4 and 3 experts
    idle = np.arange(15) // 4 == rank
    assert (loads[idle] == 0).all() and loads[~idle].max() - loads[~idle].min() <= 1


def test_the_hotspot_rotates_over_the_ranks_with_experts():
    workload = make("rotating_hotspot", (4, 8, 2, 60), heat=2.5, rank=1, period=3)
    assert [int(rank_loads(workload, step).argmax()) for step in range(12)] == [1] * 3 + [2] * 3 + [3] * 3 + [
        0
    ] * 3
    few = make("rotating_hotspot", (4, 5, 1, 60))  # 2, 2, 1 and 0 experts
    assert [list(few.hot_set(step)) for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]


def test_a_burst_ends_every_period():
    workload = make("burst", (4, 8, 2, 60), heat=3, rank=2, period=5, length=2)
    hot, calm = [40, 40, 40, 360], [120] * 4
    assert [sorted(rank_loads(workload, step)) for step in range(10)] == [calm, calm, calm, hot, hot] * 2
    assert rank_loads(workload, 4).argmax() == 2


# Refusals

OK = {"num_ranks": 4, "num_experts": 16, "top_k": 4, "tokens_per_rank": 10}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("hot", {}, "name must be one of balanced, .*, concentrated, got 'hot'"),
        ("balanced", {"heat": 2}, r"option must be one of \(none\) for workload balanced, got 'heat'"),
        ("burst", {"num_hot": 2}, "option must be one of heat, rank, period, length for workload burst, got 'num_hot'"),
        ("balanced", {"num_ranks": 0}, "num_ranks must be an integer of at least 1, got 0"),
        ("balanced", {"num_experts": 2.5}, "num_experts must be an integer of at least 1, got 2.5"),
        ("balanced", {"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ("balanced", {"top_k": 17}, "top_k must be at most num_experts=16, got 17"),
        ("balanced", {"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ("balanced", {"tokens_per_rank": -1}, "tokens_per_rank must be an integer of at least 0, got -1"),
        ("balanced", {"tokens_per_rank": 1.5}, "tokens_per_rank must be an integer of at least 0, got 1.5"),
        ("balanced", {"tokens_per_rank": (1, 2)}, r"tokens_per_rank must be one number or one per rank \(4\), got 2 "),
        ("balanced", {"tokens_per_rank": 2**28}, "tokens_per_rank must give .* at most 2147483647 copies, got 42949"),
        ("hot_rank", {"heat": 4.1}, "heat must be in 1..4, .* top_k=4 and 4 hot experts, got 4.1"),
        ("hot_rank", {"heat": 0.9}, "heat must be in 1..4, .*, got 0.9"),
        ("hot_rank", {"heat": float("nan")}, "heat must be in 1..4, .*, got nan"),
        ("hot_experts", {"heat": 3, "num_hot": 8}, "heat must be in 1..2, .* top_k=4 and 8 hot experts, got 3"),
        ("hot_experts", {"num_hot": 0}, "num_hot must be in 1..num_experts=16, got 0"),
        ("spread", {"num_hot": 17}, "num_hot must be in 1..num_experts=16, got 17"),
        ("hot_rank", {"rank": 4}, "rank must be in 0..3, the ranks that hold .* 4 on each, got 4"),
        ("zero_expert_rank", {"rank": -1}, "rank must be in 0..3, .*, got -1"),
        ("burst", {"num_experts": 5, "rank": 3}, "rank must be in 0..2, .* 2 on each, got 3"),
        ("zero_expert_rank", {"top_k": 13}, "top_k must be at most the 12 experts of other ranks, got 13"),
        ("ragged_source", {"num_ranks": 1}, "num_ranks must be at least 2 for ragged_source, got 1"),
        ("ragged_source", {"tokens_per_rank": (1, 1, 1, 2)}, "tokens_per_rank must be one number .*, got .1, 1, 1, 2"),
        ("rotating_hotspot", {"period": 0}, "period must be an integer of at least 1, got 0"),
        ("burst", {"period": 0}, "period must be an integer of at least 1, got 0"),
        ("burst", {"length": 0}, "length must be an integer of at least 1, got 0"),
        ("burst", {"length": 9}, "length must be at most period=8, got 9"),
        ("zipf", {"exponent": -1}, "exponent must be a finite number of at least 0, got -1"),
        ("zipf", {"exponent": 1.5}, "exponent=1.5 must give no expert above .* = 0.25 .*, got .* at step 0; clip=True"),
        ("lognormal", {"sigma": float("inf")}, "sigma must be a finite number of at least 0, got inf"),
        ("lognormal", {"sigma": 9.0}, "sigma=9.0 must give no expert above 1/top_k = 0.25 of the copies, got "),
        ("drift", {"drift": 5}, "exponent=0.8, drift=5 must give no expert above 1/top_k = 0.25 of the copies, got "),
        ("maxvio", {"maxvio": 3.01}, "maxvio must be in 0..3 = num_experts / top_k - 1, got 3.01"),
        ("maxvio", {"maxvio": -0.1}, "maxvio must be in 0..3 .*, got -0.1"),
        ("concentrated", {"num_hot": 0}, "num_hot must be an integer of at least 1, got 0"),
        ("concentrated", {"num_hot": 13}, "num_hot must leave the other tokens top_k=4 of num_experts=16, got 13"),
        ("concentrated", {"share": 1.1}, "share must be in 0..1, got 1.1"),
        ("concentrated", {"share": -0.1}, "share must be in 0..1, got -0.1"),
    ],
)  # fmt: skip
def test_messages(name, fields, message):
    with pytest.raises(ValueError, match=message):
        make_workload(name, **{**OK, **fields})


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_is_not_negative(name):
    workload = make_workload(name, **{**OK, "num_experts": 64})
    for call in (workload.topk_ids, workload.expert_loads):
        with pytest.raises(ValueError, match="step must be an integer of at least 0, got -1"):
            call(-1)


def test_a_later_step_of_a_drift_is_refused_too():
    workload = make("drift", (2, 16, 4, 10), exponent=0.3, drift=0.8, seed=0)
    with pytest.raises(ValueError, match="drift=0.8 must give no expert above .* at step [1-9]"):
        for step in range(100):
            workload.topk_ids(step)
