"""Policies lp and lp_sampled: the real-valued optimum, rounded or drawn, and what is said when it was not reached."""

import pytest
import torch

import isoload
from isoload import ops
from support.cases import instances
from support.oracles import lp_optimum
from support.processes import run_ranks


def placement_of(case):
    topology = isoload.Topology(case.num_ranks)
    return isoload.Placement(torch.from_numpy(case.slot_to_expert)[None], topology, case.num_experts)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_rounded_within_one_copy_per_replica_of_the_optimum(precision):
    solved = 0
    for case in instances(
        2, seed=71, max_ranks=32, families=("eplb", "random", "chain", "clique", "one_expert")
    ):
        if not all((case.slot_to_expert == e).any() for e in range(case.num_experts)):
            continue
        loads = torch.from_numpy(case.loads)
        placement = placement_of(case)
        plan = isoload.plan(loads, placement, 0, "lp", precision=precision)
        assert isoload.policies.plan.plan_errors(plan, loads) == []
        best = lp_optimum(case.expert_loads(), case.slot_to_expert, case.num_ranks)
        assert int(plan.telemetry[1]) == 0, "converged"
        slack = best * (1e-4 if precision == "float32" else 1e-8)
        assert best <= int(plan.peak) <= best + slack + placement.slots_per_rank, case
        assert int(plan.bound) <= best
        solved += 1
    assert solved > 15


def make_batch(seed=5, ranks=8, experts=64, copies=4000):
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(1, experts, generator=generator) ** 6
    placement = isoload.place(popularity * 1e5, isoload.Topology(ranks), slots_per_rank=experts // ranks + 4)
    drawn = torch.multinomial(popularity[0].expand(ranks, -1), copies, replacement=True, generator=generator)
    loads = torch.stack([isoload.count(row, experts) for row in drawn.view(ranks, -1)])
    return placement, drawn.view(ranks, -1, 4), loads


def test_draws_come_near_the_split_and_repeat():
    placement, ids, loads = make_batch()
    split = ops.plan_lp(loads, placement.layer(0, "cpu").tables).split

    def routed(**options):
        plan = isoload.plan(loads, placement, 0, "lp_sampled", **options)
        assert plan.quota is None and plan.peak is None and plan.realisation == "sample"
        assert torch.equal(plan.weights, split)
        return torch.cat([isoload.route(ids[r], loads, plan, r) for r in range(8)])

    first = routed(seed=1)
    assert torch.equal(first, routed(seed=1))
    assert not torch.equal(first, routed(seed=2)) and not torch.equal(first, routed(seed=1, step=1))
    drawn = isoload.count(first, placement.num_slots)
    assert ((drawn - split).abs() <= 6 * split.sqrt() + 6).all()
    exact = int(isoload.plan(loads, placement, 0).peak)
    assert exact < int(drawn.view(8, -1).sum(1).max()) < 1.1 * exact, "sampling costs, but not more than this"


def test_says_when_it_did_not_converge():
    placement, _, loads = make_batch()
    plan = isoload.plan(loads, placement, 0, "lp", tolerance=0.0)
    assert int(plan.telemetry[1]) in (1, 2), "the last bit cannot be had, and the status says so"
    assert isoload.policies.plan.plan_errors(plan, loads) == []


def plan_of_rank(rank):
    placement, _, loads = make_batch()
    plans = [isoload.plan(loads, placement, 0, "lp", precision=p) for p in ("float32", "float64")]
    relaxed = isoload.plan(loads, placement, 0, "lp_sampled").weights
    return [p.quota for p in plans], relaxed


def test_ranks_agree_bit_for_bit():
    first, *others = run_ranks(plan_of_rank, 3)
    for quotas, weights in others:
        assert all(torch.equal(a, b) for a, b in zip(quotas, first[0], strict=True))
        assert torch.equal(weights, first[1])


def test_refuses():
    placement, _, loads = make_batch()
    with pytest.raises(ValueError, match="precision must be one of float32, float64, got 'half'"):
        isoload.plan(loads, placement, 0, "lp", precision="half")
    with pytest.raises(ValueError, match="tolerance must be"):
        isoload.plan(loads, placement, 0, "lp", tolerance=-1.0)
