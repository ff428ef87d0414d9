"""Policies llep and llep_published: never above plain EP, within the capacity, as published where it fits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.policies import parse_policy
from isoload.policies.published_borrowing import imbalance, llep_published

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "llep_plans.json").read_text())
RANKS, EXPERTS, SPARE = 8, 64, 3


def place(
    ranks: int = RANKS, experts: int = EXPERTS, spare: int = SPARE, **options: Any
) -> isoload.Placement:
    """E / R experts per rank in order, then the spare slots."""
    topology = options.pop("topology", None) or isoload.Topology(ranks, **options)
    slots = torch.full((1, ranks, experts // ranks + spare), -1)
    slots[0, :, : experts // ranks] = torch.arange(experts).view(ranks, -1)
    return isoload.Placement(slots.view(1, -1), topology, experts, spare_slots=spare)


def skewed(seed: int, experts: int = EXPERTS, scale: int = 40_000) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(experts, generator=generator) ** 6 * scale).int()


def busiest(loads: Tensor, ranks: int = RANKS) -> int:
    return int(loads.view(ranks, -1).sum(1).max())


@pytest.mark.parametrize("split_by", ["default", "exact"])
@pytest.mark.parametrize("policy", ["llep", "llep_published", "spill_cost"])
def test_plans_are_valid_and_never_above_plain_ep(policy: str, split_by: str) -> None:
    placement, better = place(spare=8, ranks_per_node=4), 0
    for seed in range(30):
        loads = skewed(seed)
        options = {} if split_by == "default" else {"split_by": split_by}
        plan = isoload.plan(loads, placement, 0, policy, **options)
        assert isoload.policies.plan.plan_errors(plan, loads) == [], seed
        assert int(plan.peak) <= busiest(loads), seed
        better += int(plan.peak) < busiest(loads)
        if split_by == "exact" or policy != "llep_published":
            assert int(plan.peak) == int(plan.bound), seed
    assert better > 20


def test_the_capacity_is_kept_unless_a_flag_says_why() -> None:
    kept = 0
    for seed in range(60):
        loads, capacity = skewed(seed), 1.0 + 0.1 * (seed % 3)
        placement = place(spare=1 + seed % 4)
        plan = isoload.plan(loads, placement, 0, "llep", capacity=capacity, min_chunk=64, threshold=1.0)
        assert plan.telemetry is not None
        limit = -(-int(loads.sum()) * round(capacity * 1e6) // (RANKS * 10**6)) + 63
        assert int(plan.telemetry[4]) or int(plan.peak) <= limit, seed
        kept += not int(plan.telemetry[4])
    assert kept > 20


def test_route_realises_a_plan_with_borrowed_experts() -> None:
    generator = torch.Generator().manual_seed(5)
    placement = place()
    weights = torch.rand(EXPERTS, generator=generator) ** 6 + 1e-4
    ids = torch.multinomial(weights.expand(RANKS * 50, -1), 4, generator=generator).view(RANKS, 50, 4)
    loads = torch.stack([isoload.count(row, EXPERTS) for row in ids])
    for policy in ("llep:min_chunk=4", "spill_cost:expert_bytes=1000:min_chunk=1"):
        name, options = parse_policy(policy)
        plan = isoload.plan(loads, placement, 0, name, **options)
        assert plan.telemetry is not None and int(plan.telemetry[0]) > 0
        slots = torch.stack([isoload.route(ids[r], loads, plan, rank=r) for r in range(RANKS)])
        assert torch.equal(isoload.count(slots, placement.num_slots), plan.quota)
        assert torch.equal(plan.slot_to_expert[slots], ids.int())


@pytest.mark.parametrize("policy", ["llep", "spill_cost", "llep_published"])
def test_all_layers_at_once_equal_one_by_one(policy: str) -> None:
    one = place(spare=8)
    slots = one.slot_to_expert.expand(3, -1)
    placement = isoload.Placement(slots, one.topology, EXPERTS, spare_slots=8)
    loads = torch.stack([skewed(seed) for seed in range(3)])
    plans = isoload.balancing.planning.plan_layers(loads, placement, policy)
    for i in range(3):
        plan = isoload.plan(loads[i], placement, i, policy)
        for name in ("slot_to_expert", "quota", "peak", "bound", "telemetry"):
            assert torch.equal(getattr(plan, name), getattr(plans[i], name)), name


def test_shared_experts_stay_home_and_dead_ranks_help_nobody() -> None:
    topology = isoload.Topology(4, alive=(True, True, True, False))
    placement = isoload.place(torch.ones(1, 12), topology, slots_per_rank=8, spare_slots=3, num_shared=1)
    loads = torch.zeros(4, 13, dtype=torch.int32)
    loads[:, 0], loads[:, 12] = 900, 10
    plan = isoload.plan(loads, placement, 0, "llep", threshold=1.0, min_chunk=1)
    assert isoload.policies.plan.plan_errors(plan, loads) == [] and plan.quota is not None
    per_rank = plan.quota.view(4, -1).sum(1)
    assert int(per_rank[3]) == 0 and int(per_rank.max()) == -(-3640 // 3), per_rank


def test_threshold_by_rank_or_by_expert() -> None:
    loads = torch.tensor([8, 0, 8, 0], dtype=torch.int32)  # ranks are level, experts are not
    placement = place(2, 4, 2)
    for measure, flag in (("rank", 1), ("expert", 0)):
        plan = isoload.plan(loads, placement, 0, "llep", measure=measure)
        assert plan.telemetry is not None and int(plan.telemetry[4]) == flag, measure


def test_published_planner_segment_for_segment() -> None:
    twice = 0
    for case in GOLDEN:
        segments = llep_published(case["counts"], case["ranks"], case["capacity_factor"], case["min_chunk"])
        assert [list(segment) for segment in segments] == case["segments"], case["counts"]
        loads = Counter()
        for segment in segments:
            loads[segment.rank] += segment.last - segment.first
        assert [loads[r] for r in range(case["ranks"])] == case["rank_loads"]
        twice += len({(s.expert, s.rank) for s in segments}) < len(segments)
    assert twice > 1, "the published fault must be among the cases"


def test_published_segments_become_a_plan_where_they_fit() -> None:
    loads = torch.tensor([127, 1, 2, 1], dtype=torch.int32)
    options = {"capacity": 1.0, "min_chunk": 1}
    plan = isoload.plan(loads, place(2, 4, 2), 0, "llep_published", **options)
    assert plan.quota is not None and plan.telemetry is not None
    assert plan.quota.view(2, -1).tolist() == [[64, 0, 1, 1], [1, 0, 63, 1]]
    assert plan.telemetry.tolist() == [4, 2, 2, 0, 0]
    crowded = torch.tensor([90, 90, 90, 0, 0, 0], dtype=torch.int32)
    fits = place(2, 6, 2)
    assert (
        isoload.policies.plan.plan_errors(
            isoload.plan(crowded, fits, 0, "llep_published", **options), crowded
        )
        == []
    )
    with pytest.raises(
        ValueError, match="spare_slots must hold the published plan, rank 1 imports more than 1"
    ):
        isoload.plan(crowded, place(2, 6, 1), 0, "llep_published", **options)


def test_published_threshold_is_plain_ep() -> None:
    loads = torch.tensor([8, 8, 7, 7], dtype=torch.int32)
    plan = isoload.plan(loads, place(2, 4, 1), 0, "llep_published", threshold=1.3)
    assert int(plan.peak) == 16 and plan.telemetry is not None and int(plan.telemetry[4]) == 1
    assert imbalance([0, 0], 2) == 1.0 and imbalance([3, 1, 0, 0], 2) == 2.0
    assert imbalance([3, 1, 0, 0], 2, per_expert=True) == 3.0


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "capacity": ("llep", {"capacity": 0.9}, "capacity must be in 1..1000, got 0.9"),
    "published capacity": ("llep_published", {"capacity": 0.9}, "capacity must be in 1..1000, got 0.9"),
    "min_chunk": ("llep", {"min_chunk": 0}, r"min_chunk must be in 1..2\^31-1, got 0"),
    "threshold": ("llep", {"threshold": -1.0}, "threshold must be in 0..1000, got -1.0"),
    "measure": ("llep", {"measure": "node"}, "measure must be rank or expert, got 'node'"),
    "tolerance": (
        "llep",
        {"tolerance": 0.0},
        "option tolerance of policy llep was removed: a rank that is above",
    ),
    "egress": (
        "spill_cost",
        {"egress": 1},
        "option egress of policy spill_cost was removed: exports have a price",
    ),
    "split_by fill": (
        "llep",
        {"split_by": "fill"},
        "option split_by=fill of policy llep was removed: the copies go",
    ),
    "refill_above": ("llep", {"refill_above": 0.9}, "refill_above must be in 1..1000, got 0.9"),
    "split_by": ("llep", {"split_by": "evn"}, "policy must be one of .*, got 'evn'"),
    "split_by that borrows": (
        "llep",
        {"split_by": "spill_cost"},
        "split_by must be a policy that does not borrow, got 'spill_cost'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_options(name: str) -> None:
    policy, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        isoload.plan(skewed(0), place(), 0, policy, **options)


@pytest.mark.parametrize("policy", ["llep", "llep_published", "spill_cost"])
def test_refuses_placements_without_spare_slots_or_with_speeds(policy: str) -> None:
    with pytest.raises(ValueError, match=f"spare_slots must be at least 1 for policy {policy}, got 0"):
        isoload.plan(skewed(0), place(spare=0), 0, policy)
    with pytest.raises(ValueError, match=f"speeds must be None for policy {policy}, which counts copies"):
        isoload.plan(skewed(0), place(speeds=[1.0] * 7 + [2.0]), 0, policy)


def test_published_needs_experts_in_order() -> None:
    slots = place().slot_to_expert.flip(1).view(RANKS, -1).roll(-SPARE, 1).view(1, -1)
    placement = isoload.Placement(slots, isoload.Topology(RANKS), EXPERTS, spare_slots=SPARE)
    with pytest.raises(
        ValueError, match=r"policy llep_published needs experts 0\.\.63 in order, 64/8 per rank"
    ):
        isoload.plan(skewed(0), placement, 0, "llep_published")
