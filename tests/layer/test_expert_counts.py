"""Counts of experts over all ranks, for a trainer: no batch twice, no exchange that the batches made already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.layer.routers import Gate, Router
from reference.experts import run_experts
from support.processes import run_ranks
from support.small_layer import EXPERTS, make_setup, with_shared
from support.sweeps import slow

RANKS = 4
# Of a layer, with whether its batches gather the loads of all ranks.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "exact": ({}, True),
    "none": ({"policy": "none"}, True),
    "no replicas": ({}, False),
    "min_tokens": ({"min_tokens": 2**20}, False),
    "own": ({"loads": "own"}, False),
    "node": ({"loads": "node"}, False),
}


def wanted(setup: Any, batches: int = 1) -> Tensor:
    """The copies of every routed expert in the rows of all ranks, by a loop."""
    counts = [0] * EXPERTS
    for row in setup.rows:
        for expert in setup.gate(row)[0].flatten().tolist():
            if 0 <= expert < EXPERTS:
                counts[expert] += batches
    return torch.tensor(counts)


def layer_of(setup: Any, way: str, transport: Any) -> isoload.MoE:
    how, placement = WAYS[way][0], setup.placement
    if way == "no replicas":
        slots = torch.arange(3 * RANKS)
        placement = isoload.Placement(torch.where(slots < EXPERTS, slots, -1)[None], setup.topology, EXPERTS)
    return isoload.MoE(setup.gate, setup.dense, transport, placement, **how)


def over_processes(rank: int, way: str) -> tuple[list[Tensor], int, str | None]:
    """Sums of three micro-batches and of one more, what the first read sent, and the message without an exchange."""
    setup = make_setup(RANKS, masked=True)  # rank 1 has no tokens
    layer = layer_of(setup, way, isoload.CollectiveTransport(setup.topology))
    rows = setup.rows[rank].clone().requires_grad_()
    for _ in range(3):
        layer(rows, num_tokens=34 if way == "min_tokens" else None).sum().backward()
    layer.eval()
    layer(rows.detach(), num_tokens=34 if way == "min_tokens" else None)
    layer.train()
    message = None
    try:
        sums = [layer.expert_counts()]
    except ValueError as error:
        message, sums = str(error), [layer.expert_counts(exchange=True)]
    sent = layer.group.traffic.bytes["expert counts"]
    layer(rows.detach(), num_tokens=34 if way == "min_tokens" else None)
    sums += [layer.expert_counts(exchange=True), layer.expert_counts(exchange=True)]
    return sums, sent, message


@pytest.mark.parametrize("way", ["exact", "own", "min_tokens", *slow("none", "node", "no replicas")])
def test_sums_over_ranks_and_batches_since_the_last_read(way: str) -> None:
    setup = make_setup(RANKS, masked=True)
    for sums, sent, message in run_ranks(over_processes, RANKS, way):
        for got, batches in zip(sums, (3, 1, 0), strict=True):
            assert got.dtype == torch.int64 and torch.equal(got, wanted(setup, batches))
        gathered = WAYS[way][1]
        assert sent == (0 if gathered else 8 * EXPERTS)
        assert message == (
            None
            if gathered
            else "exchange must be True where not every batch gathers the loads of all ranks: call "
            "expert_counts(exchange=True) on all ranks together, got False"
        )


@pytest.mark.parametrize("way", WAYS)
def test_virtual_ranks_need_no_exchange(way: str) -> None:
    setup = make_setup(RANKS, masked=True)
    layer = layer_of(setup, way, isoload.LocalTransport(setup.topology))
    layer(setup.rows)
    assert torch.equal(layer.expert_counts(), wanted(setup)) and not layer.expert_counts().any()


def test_shared_experts_are_left_out() -> None:
    setup = with_shared(RANKS, masked=True)
    layer = isoload.MoE(setup.routed, setup.dense, isoload.LocalTransport(setup.topology), setup.placement)
    layer(setup.rows)
    assert torch.equal(layer.expert_counts(), wanted(setup))


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", *slow("compiled")])
@pytest.mark.parametrize("way", ["exact", "own", "min_tokens"])
def test_a_recompute_counts_once(how: str, way: str) -> None:
    setup = make_setup(RANKS)
    layer = layer_of(setup, way, isoload.LocalTransport(setup.topology))
    rows = [row.clone().requires_grad_() for row in setup.rows]
    if how == "compiled":
        outputs = torch.compile(layer, backend="aot_eager")(rows)
    else:
        outputs = checkpoint(
            lambda *given: tuple(layer(list(given))), *rows, use_reentrant=how == "reentrant"
        )
    sum((y**2).sum() for y in outputs).backward()
    assert torch.equal(layer.expert_counts(), wanted(setup))


@torch.no_grad()
def test_a_stack_counts_the_batches_of_its_layers() -> None:
    setup = make_setup(RANKS, masked=True)
    layer = layer_of(setup, "exact", isoload.LocalTransport(setup.topology))
    isoload.LibraStack([layer], None)
    layer(setup.rows)
    assert torch.equal(layer.expert_counts(), wanted(setup))


def test_inference_mode_leaves_sums_that_training_can_add_to() -> None:
    setup = make_setup(RANKS)
    with torch.inference_mode():
        layer = layer_of(setup, "exact", isoload.LocalTransport(setup.topology))
        layer(setup.rows)
    layer(setup.rows)
    assert torch.equal(layer.expert_counts(), wanted(setup, 2))


STEPS, SPEED = 4, 0.05


def balanced_gate(bias: Tensor) -> Gate:
    weight = torch.randn(EXPERTS, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return Gate(Router(EXPERTS, 3, "sigmoid", renormalise=True), nn.Parameter(weight), score_bias=bias)


def update_bias(gate: Gate, counts: Tensor) -> None:
    """As in docs/training.md."""
    gate.score_bias += SPEED * (counts.double().mean() - counts).sign()


def trained(rank: int, way: str) -> tuple[Tensor, Tensor]:
    """The router's bias and weight after a few steps of DeepSeek-V3's update."""
    setup = make_setup(RANKS)
    setup.gate = gate = balanced_gate(torch.zeros(EXPERTS, dtype=torch.float64))
    layer = layer_of(setup, way, isoload.CollectiveTransport(setup.topology))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for sign in (1, -1):  # micro-batches
            (layer(sign * setup.rows[rank]) ** 2).sum().backward()
        dist.all_reduce(gate.weight.grad)
        optimizer.step()
        layer.refresh_replicas()
        update_bias(gate, layer.expert_counts(exchange=not WAYS[way][1]))
    assert gate.score_bias is not None
    return gate.score_bias, gate.weight.detach()


@pytest.mark.parametrize("way", ["exact", *slow("own", "no replicas")])
def test_the_bias_of_deepseek_v3_is_that_of_one_dense_process(way: str) -> None:
    setup = make_setup(RANKS)
    gate = balanced_gate(torch.zeros(EXPERTS, dtype=torch.float64))
    stacks = [nn.Parameter(getattr(setup.dense, name).clone()) for name in ("gate_up", "down")]
    optimizer = torch.optim.SGD([*stacks, *gate.parameters()], lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        counts = torch.zeros(EXPERTS, dtype=torch.int64)
        for sign in (1, -1):
            rows = sign * torch.cat(setup.rows)
            ids, weights = gate(rows)
            (run_experts(rows, ids, weights, *stacks, None, None) ** 2).sum().backward()
            counts += ids.flatten().bincount(minlength=EXPERTS)
        optimizer.step()
        update_bias(gate, counts)
    assert gate.score_bias is not None and gate.score_bias.unique().numel() > 2
    for bias, weight in run_ranks(trained, RANKS, way):
        assert torch.equal(bias, gate.score_bias)
        torch.testing.assert_close(weight, gate.weight.detach(), rtol=1e-12, atol=1e-12)
