"""Compiled into one graph, for tests, and a small layer to be compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import isoload
from isoload.transport import LocalTransport
from support.small_layer import make_setup


def compile_whole(function: Any, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Layer(nn.Module):
    """A layer between other work, whose choices come from outside."""

    def __init__(self, setup: Any, transport: Any = None, **how: Any) -> None:
        super().__init__()
        self.setup, transport = setup, transport or LocalTransport(setup.topology)
        self.moe = isoload.MoE(setup.gate, setup.dense, transport, setup.placement, **how)

    def forward(self, rows: list[Tensor]) -> list[Tensor]:
        return [y * 2 for y in self.moe([r + 1 for r in rows])]


def small(**how: Any) -> Layer:
    return Layer(make_setup(4, dtype=torch.float32, masked=True), **how)


def both_ways(run: Any, layer: Layer, rows: list[Tensor]) -> list[Tensor]:
    """Outputs and all gradients."""
    leaves = [r.clone().requires_grad_() for r in rows]
    outputs = run(leaves)
    loss = sum(y.square().sum() for y in outputs)
    trained = [p for p in layer.parameters() if p.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, [*leaves, *trained])]
