"""Policy grace_sampled of the benches: draws from the nearest replicas, in the proportions of their weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2

import isoload
import reference
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.policies import sample_seed
from isoload.traces import read_trace
from support.grace_cases import draw, tier

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from lib.published_policies import registered

SHIPPED = Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz"


@pytest.fixture(autouse=True)
def policies_of_the_benches():
    with registered():
        yield


LOCALITY = pytest.mark.parametrize("locality", [True, False])


def tokens_of(loads, generator):
    """[R] of [T, 1] ids: as many tokens as loads [R, E] says, at most 40 of an expert and rank, and one masked."""
    ids = []
    for row in loads.clamp(max=40):
        flat = torch.repeat_interleave(torch.arange(len(row)), row.long())
        flat = torch.cat([flat[torch.randperm(len(flat), generator=generator)], torch.tensor([-1])])
        ids.append(flat.unsqueeze(1))
    return ids


@LOCALITY
def test_weights_of_a_rank_are_those_of_its_nearest_tier(locality):
    differ = 0
    for seed in range(60):
        placement, loads = draw(seed)
        for layer in range(2):
            plan = isoload.plan(loads[layer], placement, layer, "grace_sampled", locality=locality)
            assert (plan.realisation, plan.quota, plan.peak) == ("sample", None, None)
            for rank in range(placement.topology.num_ranks):
                weights, left = plan.policy.weights_of(plan, rank), torch.zeros(placement.num_slots)
                for expert in range(placement.num_experts):
                    held, part = tier(placement, layer, expert, rank, locality)
                    left[held] = torch.tensor(part, dtype=torch.float64).div(sum(part)).float()
                assert weights.dtype == torch.float32 and torch.allclose(weights, left, rtol=1e-6, atol=0)
                differ += not torch.equal(weights, plan.weights)
    assert (differ > 100) == locality, "without locality all ranks draw as the plan says"


@LOCALITY
def test_every_copy_is_drawn_from_its_tier_as_the_reference_draws(locality):
    generator = torch.Generator().manual_seed(5)
    copies = 0
    for seed in range(12):
        placement, loads = draw(seed)
        ids = tokens_of(loads[1], generator)
        own = torch.stack([isoload.count(rows, placement.num_experts) for rows in ids])
        plan = isoload.plan(own, placement, 1, "grace_sampled", seed=seed, step=3, locality=locality)
        for rank, rows in enumerate(ids):
            slots = isoload.route(rows, own, plan, rank)
            weights = plan.policy.weights_of(plan, rank)
            wanted = reference.route_sampled(rows, weights, plan.tables, *sample_seed(plan, rank))
            assert torch.equal(slots, wanted)
            for expert, slot in zip(rows.flatten().tolist(), slots.flatten().tolist(), strict=True):
                assert slot == -1 if expert == -1 else slot in tier(placement, 1, expert, rank, locality)[0]
                copies += 1
    assert copies > 1000


@LOCALITY
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_frequencies_follow_the_weights(locality, seed):
    """Pearson's chi-square over all ranks and experts with a choice stays below its 99.9 % point."""
    topology = isoload.Topology(8, 4)
    slots = torch.tensor([[0, 1, 2, 0, 1, 3, 0, 4, 5, 2, 3, 1, 2, 4, 1, 0]])
    weight = torch.tensor([[1.0, 2, 3, 0.5, 1, 4, 1, 1, 1, 0.25, 6, 2, 1, 3, 0.5, 1]])
    placement = isoload.Placement(slots, topology, 6, replica_weight=weight)
    ids = torch.arange(6).repeat(4000).view(-1, 3)
    loads = isoload.count(ids, 6).expand(8, -1).contiguous()
    plan = isoload.plan(loads, placement, 0, "grace_sampled", seed=seed, locality=locality)
    statistic, freedom = 0.0, 0
    for rank in range(8):
        drawn = isoload.count(isoload.route(ids, loads, plan, rank), 16).double()
        for expert in range(6):
            held, part = tier(placement, 0, expert, rank, locality)
            wished = torch.tensor(part, dtype=torch.float64) / sum(part) * 4000
            assert drawn[held].sum() == 4000, "nothing outside of the tier"
            statistic += float(((drawn[held] - wished) ** 2 / wished).sum())
            freedom += len(held) - 1
    assert freedom > 5 and statistic < chi2.ppf(0.999, freedom)


def test_streams_differ_by_seed_step_layer_and_rank():
    placement = isoload.Placement(torch.zeros(2, 3, dtype=torch.int32), isoload.Topology(3), 1)
    ids = torch.zeros(64, 1, dtype=torch.int64)
    loads = torch.full((3, 1), 64, dtype=torch.int32)
    found = set()
    for layer, seed, step in ((0, 0, 0), (0, 7, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0)):
        plan = isoload.plan(loads, placement, layer, "grace_sampled", seed=seed, step=step, locality=False)
        for rank in range(3):
            slots = isoload.route(ids, loads, plan, rank)
            assert torch.equal(slots, isoload.route(ids, loads, plan, rank))
            found.add(tuple(slots.flatten().tolist()))
    assert len(found) == 5 * 3


def test_layers_at_once_are_layers_one_by_one():
    placement, loads = draw(3)
    whole = isoload.balancing.planning.plan_layers(loads, placement, "grace_sampled")
    for layer in range(2):
        one = isoload.plan(loads[layer], placement, layer, "grace_sampled")
        assert torch.equal(whole[layer].weights, one.weights)
        for rank in range(placement.topology.num_ranks):
            mine = whole[layer].policy.weights_of(whole[layer], rank)
            assert torch.equal(mine, one.policy.weights_of(one, rank))
            assert torch.equal(whole.policy.weights_of(whole, rank)[layer], mine)


def test_other_sampled_policies_draw_with_the_plans_weights():
    placement, loads = draw(4)
    for policy in ("dynamic", "lp_sampled"):
        plan = isoload.plan(loads[0], placement, 0, policy)
        assert plan.policy.weights_of(plan, 0) is plan.weights


def test_a_balancer_follows_a_new_placement_and_counts_its_batches():
    topology = isoload.Topology(4, 2)
    counts = torch.rand(2, 8, generator=torch.Generator().manual_seed(1))
    before, after = (isoload.place(row[None], topology, slots_per_rank=4) for row in counts)
    balancer = isoload.Balancer(before, policy="grace_sampled", group=isoload.LocalGroup(topology))
    ids = [torch.arange(8).repeat(20).view(-1, 2) for _ in range(4)]
    first, second = balancer(ids), balancer(ids)
    assert not all(map(torch.equal, first, second)), "every batch draws anew"
    for placement in (before, after):
        if placement is after:
            balancer.load(after)
        for rank, slots in enumerate(balancer(ids)):
            assert torch.equal(placement.slot_to_expert[0][slots].long(), ids[rank])
            for expert in range(8):
                held = set(slots[ids[rank] == expert].tolist())
                assert held <= set(tier(placement, 0, expert, rank, True)[0])


def test_realised_copies_are_counted_from_routed_slots():
    trace = read_trace(SHIPPED).select_layers([0, 1])
    policies = ("grace", "grace_sampled", "grace_sampled:locality=False")
    settings = ReplaySettings(8, 4, max_batches=2, policies=policies)
    cut, near, anywhere = replay(trace, settings).policies
    assert near.remote_node_share < anywhere.remote_node_share
    assert near.remote_node_copy_share == cut.remote_node_copy_share, (
        "the tier says which copies leave the node"
    )
    assert near.gap_max > 0
