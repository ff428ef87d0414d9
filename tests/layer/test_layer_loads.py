"""MoE by own counts or a node's: the dense layer, its gradients, and what other ranks hear of a failure."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from support.processes import rank_outcomes, run_ranks
from support.small_layer import check_dense, close, dense_layer, make_setup, with_shared
from support.sweeps import slow

BY_COUNTS = pytest.mark.parametrize("loads", ["own", "node"])


def layer_of(setup, loads, transport=None, **how):
    transport = LocalTransport(setup.topology) if transport is None else transport
    return MoE(setup.gate, setup.dense, transport, setup.placement, loads=loads, **how)


@BY_COUNTS
@pytest.mark.parametrize("ranks", [4, 8])
def test_it_is_the_dense_layer_before_and_after_an_exchange(loads, ranks):
    setup = make_setup(ranks, masked=True)
    layer = layer_of(setup, loads)
    for _ in range(2):
        layer.zero_grad()
        check_dense(setup, layer)
        assert layer.last_plan is None
        assert layer.exchange().imbalance.item() >= 1
    assert layer.balancer.own_counts.offset.any()


@BY_COUNTS
def test_with_shared_experts(loads):
    setup = with_shared(4, 2, masked=True)
    dense_gate, setup.gate = setup.gate, setup.routed
    layer = layer_of(setup, loads)
    setup.gate = dense_gate
    check_dense(setup, layer)


@BY_COUNTS
def test_a_recompute_counts_no_batch_again(loads):
    setup = make_setup(4)
    twice, once = layer_of(setup, loads), layer_of(setup, loads)
    sum((y**2).sum() for y in checkpoint(twice, setup.rows, use_reentrant=False)).backward()
    sum((y**2).sum() for y in once(setup.rows)).backward()
    mine, theirs = twice.balancer.own_counts, once.balancer.own_counts
    assert (
        torch.equal(mine.recent, theirs.recent) and torch.equal(mine.sent, theirs.sent) and mine.recent.any()
    )


def on_rank(rank, loads):
    setup = make_setup(4)  # rank 1 has no tokens
    transport = CollectiveTransport(setup.topology)
    layer = layer_of(setup, loads, transport)
    outputs = []
    for step in range(3):
        if step == 2:
            layer.exchange()
        transport.group.reset_traffic()
        layer.zero_grad()
        rows = setup.rows[rank].clone().requires_grad_()
        y = layer(rows)
        gathered = transport.group.traffic.bytes["gather"]
        (y**2).sum().backward()
        grads = [rows.grad, *(p.grad for p in layer.expert_parameters())]
        outputs = [y.detach(), *grads]
    return outputs, gathered, list(layer.weights[0].layout.homes)


@BY_COUNTS
def test_over_processes_with_an_empty_rank(loads):
    setup = make_setup(4)
    stacks = [getattr(setup.dense, name).clone().requires_grad_() for name in ("gate_up", "down")]
    rows = [r.clone().requires_grad_() for r in setup.rows]
    wanted = [dense_layer(setup, r, [*stacks, None, None]) for r in rows]
    sum((y**2).sum() for y in wanted).backward()
    for rank, ((y, to_rows, *to_stacks), gathered, homes) in enumerate(run_ranks(on_rank, 4, loads)):
        assert close(y, wanted[rank], 1e-12) and close(to_rows, rows[rank].grad, 4e-12)
        for grad, stack in zip(to_stacks, stacks, strict=True):
            assert close(grad, stack.grad[homes], 4e-12)
        assert (gathered == 0) is (loads == "own")


def failing(rank, loads, capacity):
    setup = make_setup(4)
    layer = layer_of(setup, loads, CollectiveTransport(setup.topology, max_tokens_per_rank=capacity))
    chosen = layer.gate

    def gate(rows):
        if rank == 3:
            raise ValueError("rows of rank 3 are not to its liking")
        return chosen(rows)

    layer.gate = gate
    with pytest.raises(ValueError) as raised:
        layer(setup.rows[rank])
    layer.gate = chosen
    layer(setup.rows[rank])  # nothing is left behind
    layer.exchange()  # which names a failure that all have heard of no more
    return str(raised.value)


@BY_COUNTS
@pytest.mark.parametrize("capacity", [None, 16])
def test_a_failure_stops_all_nodes_in_dispatch(loads, capacity):
    outcomes = rank_outcomes(failing, 4, loads, capacity, timeout=30, group_timeout=10)
    assert [o.error for o in outcomes] == [None] * 4, outcomes[0].error
    *others, own = [o.value for o in outcomes]
    assert own == "rows of rank 3 are not to its liking"
    told = [
        f"rank {rank} failed in stage count, so all ranks stop; see the error of that rank" for rank in (2, 3)
    ]
    assert others[:2] == [told[loads == "own"]] * 2 and others[2] == told[1]


@pytest.mark.parametrize("loads", ["own", *slow("node")])
def test_a_balancer_compiles_to_one_graph(loads):
    setup = make_setup(4)
    eager, traced = (layer_of(setup, loads).balancer for _ in "ab")
    compiled = torch.compile(lambda ids: traced(ids), fullgraph=True, backend="eager")
    for _ in range(2):
        ids = [setup.gate(row)[0] for row in setup.rows]
        for mine, theirs in zip(compiled(ids), eager(ids), strict=True):
            assert torch.equal(mine, theirs)
    assert torch.equal(traced.own_counts.recent, eager.own_counts.recent) and traced.own_counts.recent.any()


@BY_COUNTS
def test_a_stack_refuses_it(loads):
    setup = make_setup(4)
    message = f"layers must have loads='gathered' in a stack, which plans by all ranks' loads, got {loads!r} in layer 0"
    with pytest.raises(ValueError, match=message):
        isoload.LibraStack([layer_of(setup, loads)], None)


@BY_COUNTS
@pytest.mark.parametrize("policy", ["llep", "waterfill", "dynamic"])
def test_refuses_other_policies(loads, policy):
    with pytest.raises(
        ValueError, match=f"policy must be exact with objective spread for loads={loads!r}, got"
    ):
        layer_of(make_setup(4), loads, policy=policy)
