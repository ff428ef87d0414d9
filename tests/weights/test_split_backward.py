"""Backward in two parts, of inputs and later of weights, as zero-bubble schedules run it: the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import isoload
from isoload.transport import CollectiveTransport, LocalTransport
from support.processes import run_ranks

EXPERTS, HIDDEN = 8, 16
POLICIES: dict[str, tuple[dict[str, Any], int, int]] = {  # options, replicas and spare slots per rank
    "none": ({}, 0, 0),
    "exact": ({}, 1, 0),
    "llep": ({"min_chunk": 1, "threshold": 1.0}, 1, 2),
    "hedge": ({}, 0, 2),
}


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.5 * torch.randn(EXPERTS, HIDDEN, dtype=torch.float64))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (rows @ self.weight.t()).softmax(-1).topk(2)
        return ids, weights


def make_layer(policy: str, ranks: int, transport: Any) -> isoload.MoE:
    torch.manual_seed(0)
    options, replicas, spare = POLICIES[policy]
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        torch.ones(1, EXPERTS),
        topology,
        EXPERTS // ranks + replicas + spare,
        placer="trivial",
        spare_slots=spare,
    )
    experts = isoload.ExpertWeights.random(EXPERTS, HIDDEN, 24, bias=True, dtype=torch.float64)
    return isoload.MoE(Router(), experts, transport(topology), placement, 0, policy, **options)


def gradients(layer: isoload.MoE, rank: int, split: bool) -> list[Tensor]:
    """The Parameters' gradients of three micro-batches, which have two buffers for borrowed experts."""
    layer.zero_grad()
    parts = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank)
        rows = [
            torch.randn(20, HIDDEN, dtype=torch.float64, generator=draw).requires_grad_()
            for _ in layer.group.ranks
        ]
        outputs = torch.cat(layer(rows))
        parts.append((rows, outputs, torch.randn(outputs.shape, dtype=torch.float64, generator=draw)))
    if not split:
        for _, outputs, grad in parts:
            outputs.backward(grad)
    else:
        groups = [
            stage_backward_input([outputs], [grad], rows, layer.parameters())[1]
            for rows, outputs, grad in parts
        ]
        for group in groups:
            stage_backward_weight(layer.parameters(), group)
    return [parameter.grad.clone() for parameter in layer.parameters()]


def check_split(rank: int, policy: str, ranks: int, transport: Any, divisor: int) -> None:
    layer = make_layer(policy, ranks, transport)
    for weights in layer.weights:
        weights.gradient_divisor = divisor  # as DistributedDataParallel's recipe sets it
    for whole, split in zip(gradients(layer, rank, False), gradients(layer, rank, True), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("divisor", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_on_virtual_ranks(policy: str, divisor: int) -> None:
    """Regression: returned gradients were added in place to tensors that backward was called with again."""
    check_split(0, policy, 4, LocalTransport, divisor)


@pytest.mark.parametrize("policy", ["exact", "llep"])
def test_gradients_on_two_processes(policy: str) -> None:
    run_ranks(check_split, 2, policy, 2, CollectiveTransport, 1)
