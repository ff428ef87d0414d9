"""Layers whose rows cross to a node once are the dense layer, under every policy, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.layer.stack import LibraStack
from isoload.transport import CollectiveTransport, LocalTransport, NodeDispatcher
from support.borrowed_layer import LLEP, TOLERANCE, Setup, assert_dense, close, make_setup
from support.processes import rank_outcomes, run_ranks
from support.small_layer import check_dense, with_shared
from support.small_layer import make_setup as make_small
from support.stacks import Model, run

CAPACITIES = [None, 13]
TOKENS = (13, 0, 7, 9, 1, 12, 5, 8)
EMPTY = {
    "ranks without tokens": (0, 0, 7, 9, 0, 0, 5, 8),
    "no tokens": (0,) * 8,
    "one token": (0, 1, 0, 0, 0, 0, 0, 0),
}


def by_nodes(topology: isoload.Topology, capacity: int | None = None) -> LocalTransport:
    transport = LocalTransport(topology, capacity, dispatch="node")
    assert isinstance(transport.dispatcher, NodeDispatcher)
    return transport


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("policy", isoload.POLICIES)
def test_every_policy(policy: str, capacity: int | None) -> None:
    """Replicas, several of a token's experts on one rank, and borrowed experts where the policy has them."""
    if isoload.POLICIES[policy]().borrows:
        setup = make_setup(4)
        how = {key: value for key, value in LLEP.items() if policy in ("llep", "llep_published")}
        layer = setup.layer(by_nodes(setup.placement.topology, capacity), **{**how, "policy": policy})
        assert_dense(setup, layer)
        return
    needs_shared = policy in ("shared_local", "waterfill", "waterfill_sampled", "joint")
    small = with_shared(4) if needs_shared else make_small(4, masked=True)
    transport = by_nodes(small.topology, capacity)
    gate = small.routed if needs_shared else small.gate
    check_dense(small, isoload.MoE(gate, small.dense, transport, small.placement, policy=policy))


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("tokens", EMPTY)
def test_ranks_and_nodes_without_tokens(tokens: str, capacity: int | None) -> None:
    setup = make_setup(8, tokens=EMPTY[tokens])
    assert_dense(setup, setup.layer(by_nodes(setup.placement.topology, capacity), **LLEP))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    setup = make_setup(4, dtype=dtype, bias=True)
    assert_dense(setup, setup.layer(by_nodes(setup.placement.topology), **LLEP))


def test_tokens_that_all_choose_one_node() -> None:
    setup = make_setup(4)
    for ids in setup.ids:
        ids.copy_(torch.arange(3).expand_as(ids))  # on the first node
    for capacity in CAPACITIES:
        assert_dense(setup, setup.layer(by_nodes(setup.placement.topology, capacity), policy="exact"))


def test_without_gradients_the_same_bits() -> None:
    setup = make_setup(4)
    outs: list[Any] = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        layer = setup.layer(by_nodes(setup.placement.topology), **LLEP)
        with mode():
            outs.append(layer(setup.rows))
    for grad, *others in zip(*outs, strict=True):
        assert all(torch.equal(grad, other) for other in others)


def run_rank(rank: int, capacity: int | None, how: dict[str, Any]) -> list[Tensor]:
    """This rank's outputs, gradients of its rows and of its experts, and the rows that it sent."""
    torch.set_num_threads(1)
    setup = make_setup(4)
    transport = CollectiveTransport(setup.placement.topology, None, capacity, dispatch="node")
    layer = setup.layer(transport, **how)
    rows = setup.rows[rank].clone().requires_grad_()
    (y,) = layer([rows])
    y.square().sum().backward()
    assert rows.grad is not None
    return [
        y.detach(),
        rows.grad,
        *(p.grad for p in layer.parameters() if p.grad is not None),
        transport.group.traffic.rows,
    ]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("how", [{"policy": "exact"}, LLEP], ids=str)
def test_two_nodes_of_two_processes(how: dict[str, Any], capacity: int | None) -> None:
    """As in one process: outputs and gradients to the bit, and the rows that every rank sends."""
    setup = make_setup(4)
    transport = by_nodes(setup.placement.topology, capacity)
    layer = setup.layer(transport, **how)
    rows = setup.leaves()
    ys = layer(rows)
    torch.cat(ys).square().sum().backward()
    wanted, grads, _ = setup.dense_run()
    for rank, (y, grad, *rest) in enumerate(run_ranks(run_rank, 4, capacity, how)):
        assert torch.equal(y, ys[rank]) and torch.equal(grad, rows[rank].grad)
        assert close(y, wanted[rank], 1e-12) and close(grad, grads[rank], 4e-12)
        assert torch.equal(rest[-1][rank], transport.group.traffic.rows[rank])
        own = [p.grad for p in layer.weights[rank].parameters() if p.grad is not None]
        for mine, other in zip(rest[:-1], own, strict=True):
            assert close(mine, other, TOLERANCE[torch.float64])


def fail_once(rank: int, capacity: int | None) -> None:
    torch.set_num_threads(1)
    setup: Setup = make_setup(4)
    transport = CollectiveTransport(setup.placement.topology, None, capacity, dispatch="node")
    layer = setup.layer(transport, policy="none")
    layer([setup.rows[rank]])
    if rank == 2:
        layer.gate = lambda rows: 1 / 0
    layer([setup.rows[rank]])


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_rank_that_fails_is_every_ranks_failure(capacity: int | None) -> None:
    """Told with the row counts, since nothing is gathered under `none`."""
    found = [o.error.strip().splitlines()[-1] for o in rank_outcomes(fail_once, 4, capacity) if o.error]
    told = "ValueError: rank 2 failed in stage count, so all ranks stop; see the error of that rank"
    assert found == [told, told, "ZeroDivisionError: division by zero", told]


@pytest.mark.parametrize("capacity", [None, 15])
def test_a_planned_stack_over_nodes(capacity: int | None) -> None:
    """Local copies are computed while the others travel in two hops, own contributions joining the sum."""
    model = Model(4)
    layers = model.layers(by_nodes(model.topology, capacity))
    LibraStack(layers, "last")
    with torch.no_grad():
        for batch in range(3):
            rows = model.rows(batch)
            for got, want in zip(run(layers, rows), model.wanted(rows), strict=True):
                assert close(got, want, 1e-12)
