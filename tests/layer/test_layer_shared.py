"""Shared experts inside the layer, and batches that are not worth a plan: still the dense layer."""

from __future__ import annotations

import pytest
import torch

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from support.processes import rank_outcomes, run_ranks
from support.small_layer import EXPERTS, check_dense, close, dense_layer, make_setup, with_shared

POLICIES = ["none", "static", "even", "dynamic", "exact", "shared_local", "waterfill", "joint"]


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_dispatched_shared_experts_are_the_dense_layer(policy, ranks, num_shared):
    setup = with_shared(ranks, num_shared, masked=True)
    layer = MoE(setup.routed, setup.dense, LocalTransport(setup.topology), setup.placement, policy=policy)
    check_dense(setup, layer)


def test_the_published_sampling_is_the_dense_layer_too():
    for rule in ("static", "dynamic", "blog"):
        setup = with_shared(4, tokens=[80, 70, 0, 65])
        transport = LocalTransport(setup.topology)
        check_dense(
            setup,
            MoE(setup.routed, setup.dense, transport, setup.placement, policy="waterfill_sampled", rule=rule),
        )


def joint_on_rank(rank, ranks):
    setup = with_shared(ranks)
    transport = CollectiveTransport(setup.topology)
    layer = MoE(setup.routed, setup.dense, transport, setup.placement, policy="joint")
    y = layer(setup.rows[rank])
    return (
        y.detach(),
        layer.last_plan.quota,
        layer.last_plan.shared.by_rank,
        transport.group.traffic.rows[rank],
    )


def test_processes_agree_on_shared_copies():
    ranks = 3
    setup = with_shared(ranks)
    transport = LocalTransport(setup.topology)
    layer = MoE(setup.routed, setup.dense, transport, setup.placement, policy="joint")
    ys = layer(setup.rows)
    for rank, (y, quota, share, sent) in enumerate(run_ranks(joint_on_rank, ranks, ranks)):
        assert torch.equal(y, ys[rank]) and torch.equal(quota, layer.last_plan.quota)
        assert torch.equal(share, layer.last_plan.shared.by_rank)
        assert torch.equal(sent, transport.group.traffic.rows[rank])


def without_freedom(setup):
    """Every expert once; the last addresses hold nothing."""
    ranks = setup.topology.num_ranks
    slots = torch.arange(-(-EXPERTS // ranks) * ranks)
    return isoload.Placement(torch.where(slots < EXPERTS, slots, -1)[None], setup.topology, EXPERTS)


def test_small_batches_and_fixed_placements_gather_nothing():
    setup = with_shared(4)
    total = sum(map(len, setup.rows))
    transport = LocalTransport(setup.topology)
    layer = MoE(
        setup.routed,
        setup.dense,
        transport,
        setup.placement,
        policy="joint",
        min_tokens=total,
    )
    layer(setup.rows)
    assert layer.last_plan is not None, "an unknown number of tokens is planned"
    layer(setup.rows, num_tokens=total)
    assert layer.last_plan is not None and transport.group.traffic.bytes["gather"] > 0
    transport.group.reset_traffic()
    small = layer(setup.rows, num_tokens=total - 1)
    assert layer.last_plan is None and transport.group.traffic.bytes["gather"] == 0
    for y, rows in zip(small, setup.rows, strict=True):
        assert close(y, dense_layer(setup, rows, [setup.dense.gate_up, setup.dense.down, None, None]), 1e-12)

    fixed = make_setup(4)
    layer = MoE(fixed.gate, fixed.dense, LocalTransport(fixed.topology), without_freedom(fixed))
    outputs = layer(fixed.rows)
    assert layer.last_plan is None and layer.transport.group.traffic.bytes["gather"] == 0
    sum((y**2).sum() for y in outputs).backward()
    for y, rows in zip(outputs, fixed.rows, strict=True):
        assert close(y, dense_layer(fixed, rows, [fixed.dense.gate_up, fixed.dense.down, None, None]), 1e-12)


def test_a_capacity_says_how_many_tokens_there_can_be():
    setup = with_shared(2, tokens=[3, 5])
    for min_tokens, planned in ((12, True), (13, False)):
        transport = LocalTransport(setup.topology, max_tokens_per_rank=6)
        layer = MoE(setup.routed, setup.dense, transport, setup.placement, min_tokens=min_tokens)
        layer(setup.rows)
        assert (layer.last_plan is not None) is planned


def failing_without_a_gather(rank):
    setup = make_setup(3)

    def gate(rows):
        if rank == 2:
            raise ValueError("rows of rank 2 are not to its liking")
        return setup.gate(rows)

    MoE(gate, setup.dense, CollectiveTransport(setup.topology), without_freedom(setup))(setup.rows[rank])


def test_without_a_gather_a_failure_is_told_in_the_row_counts():
    outcomes = rank_outcomes(failing_without_a_gather, 3, timeout=30, group_timeout=10)
    errors = [outcome.error or "" for outcome in outcomes]
    assert "rows of rank 2 are not to its liking" in errors[2]
    for rank in (0, 1):
        assert "rank 2 failed in stage count" in errors[rank]


def test_refuses():
    setup = make_setup(2)
    with pytest.raises(ValueError, match="min_tokens must be at least 0, got -1"):
        MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, min_tokens=-1)

    def twice(rows):
        ids, weights = setup.gate(rows)
        return ids[:, :1].expand(-1, 3), weights

    layer = MoE(twice, setup.dense, LocalTransport(setup.topology), setup.placement)
    with pytest.raises(ValueError, match="topk_ids must not repeat an expert within a token"):
        layer(setup.rows)
    with pytest.raises(ValueError, match=r"topk_ids must be in -1\.\.10, got 11"):
        isoload.balancing.routing.route_fixed(torch.tensor([[11]]), setup.placement.layer(0, "cpu"), 0)
