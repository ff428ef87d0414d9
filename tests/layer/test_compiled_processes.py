"""Compiled layers over processes, and over experts that a model holds: the bits of eager code."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split

import isoload
from isoload.transport import CollectiveTransport, LocalTransport
from support.compiled import Layer, assert_equal, both_ways, compile_whole
from support.moved_layer import deal
from support.moved_layer import make_setup as make_moved
from support.processes import run_ranks
from support.small_layer import make_setup
from support.sweeps import slow


@pytest.mark.slow
def test_a_shard_given_as_a_function_ends_the_graph() -> None:
    setup = make_setup(2, dtype=torch.float32)
    placement = isoload.place(torch.ones(1, 11), setup.topology, placer="trivial")
    stacks = [
        {name: nn.Parameter(s[placement.home_experts(0, r)]) for name, s in setup.dense.stacks().items()}
        for r in range(2)
    ]
    shards = [
        isoload.weights.shard.Shard(
            placement.home_experts(0, r), lambda own=own: isoload.ExpertWeights(**own)
        )
        for r, own in enumerate(stacks)
    ]
    layer = isoload.MoE(setup.gate, shards, LocalTransport(setup.topology), placement)
    leaves = [p for own in stacks for p in own.values()]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="expert Parameters of other modules"):
        compile_whole(layer)(setup.rows)
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(layer, backend="aot_eager"), layer):
        loss = sum(y.square().sum() for y in run(setup.rows))
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert_equal(*found)


def over_shards(rank: int, distributed: bool) -> None:
    """Experts that the model holds; those in DTensors end the graph, and are right between two."""
    setup = make_setup(2, dtype=torch.float32)
    placement = isoload.place(torch.arange(11)[None], setup.topology, slots_per_rank=7)
    homes = placement.home_experts(0, rank)
    own = {name: stack[list(homes)] for name, stack in setup.dense.stacks().items()}
    if distributed:
        mesh = DeviceMesh("cpu", [0, 1])
        own = {n: DTensor.from_local(s, mesh, [Split(0)], run_check=False) for n, s in own.items()}
    weights = isoload.ExpertWeights(**{name: nn.Parameter(stack) for name, stack in own.items()})
    transport = CollectiveTransport(setup.topology)
    layer = isoload.MoE(setup.gate, isoload.weights.shard.Shard(homes, weights), transport, placement)
    rows = setup.rows[rank]
    if distributed:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="expert Parameters of other modules"):
            compile_whole(layer)(rows)
        torch._dynamo.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=not distributed)
    found = []
    for function in (run, layer):
        y = function(rows)
        grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        found.append([y, *(g.to_local() if distributed else g for g in grads)])
    assert_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [True, *slow(False)])
def test_experts_of_a_shard(distributed: bool) -> None:
    run_ranks(over_shards, 2, distributed, timeout=200)


def without_experts(rank: int) -> None:
    """On the first rank."""
    setup = make_moved(2)
    placement = deal(random.Random(4), setup.topology, 11, empty=[0])
    layer = isoload.MoE(setup.gate, setup.dense, CollectiveTransport(setup.topology), placement)
    assert (len(layer.weights[0].down) == 0) == (rank == 0)
    found = []
    for function in (compile_whole(layer), layer):
        rows = setup.rows[rank].clone().requires_grad_()
        y = function(rows)
        grads = torch.autograd.grad(
            y.square().sum(), [rows, *layer.parameters()], allow_unused=True, materialize_grads=True
        )
        found.append([y, *grads])
    assert_equal(*found)


def test_a_rank_without_experts() -> None:
    run_ranks(without_experts, 2, timeout=200)


def over_processes(rank: int, ranks: int) -> None:
    setup = make_setup(ranks, dtype=torch.float32, masked=True)
    layer = Layer(setup, CollectiveTransport(setup.topology))
    run = compile_whole(layer)
    for scale in (1, 2):
        rows = [setup.rows[rank] * scale]
        assert_equal(both_ways(run, layer, rows), both_ways(layer, layer, rows))
    with torch.no_grad():
        if rank == 0:
            layer.moe.weights[0].down.mul_(1.5)
        message = "replicas must be refreshed" if rank == 0 else "rank 0 failed in stage count"
        with pytest.raises(ValueError, match=message):
            run([setup.rows[rank]])
        layer.moe.refresh_replicas()
        assert_equal(run([setup.rows[rank]]), layer([setup.rows[rank]]))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_over_processes(ranks: int) -> None:
    """Row counts that only the host has, in one graph; the second of 3 ranks has no tokens."""
    run_ranks(over_processes, ranks, ranks, timeout=200)
