"""Experts without tokens on a GPU: their bfloat16 gradients are zeros, whatever lay in the memory that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import LocalTransport
from isoload.weights.compute import run_experts
from isoload.weights.experts import Activation, ClampedGLU, ExpertWeights, SwiGLU
from support.borrowed_layer import LLEP
from support.borrowed_layer import make_setup as make_borrowing_setup

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
EXPERTS, HIDDEN, INNER, TOP_K = 8, 64, 32, 2
BUSY = {  # the experts that get copies
    "the first and the last idle": [1, 2, 4, 6],
    "one busy": [3],
    "the last alone": [7],
    "none": [],
}


def poison() -> None:
    """Fills memory that torch hands out again with NaN in every dtype: large blocks, and small ones."""
    held = [
        torch.full((2**size,), 255, dtype=torch.uint8, device=DEVICE) for size in (26, *[19] * 64, *[12] * 64)
    ]
    del held


def draw(busy: list[int], num_rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N, H], slots [N, K] of busy experts only, weights [N, K]."""
    draw = torch.Generator().manual_seed(len(busy))
    slots = torch.full((num_rows, TOP_K), -1)
    if busy:
        slots = torch.tensor(busy)[torch.randint(len(busy), slots.shape, generator=draw)]
    rows = torch.randn(num_rows, HIDDEN, generator=draw).bfloat16()
    return rows, slots, torch.rand(slots.shape, generator=draw)


def train(device: str, busy: list[int], activation: Activation) -> list[Tensor]:
    """The output and the gradients of the rows, the gate weights and every stack, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    made = ExpertWeights.random(EXPERTS, HIDDEN, INNER, bias=True, generator=generator, dtype=torch.bfloat16)
    stacks = [
        s.to(device).requires_grad_() for s in (made.gate_up, made.down, made.gate_up_bias, made.down_bias)
    ]
    rows, slots, weights = (t.to(device) for t in draw(busy))
    leaves = [rows.requires_grad_(), weights.requires_grad_(), *stacks]
    if device == DEVICE:
        poison()
    y = run_experts(rows, slots, weights, [ExpertWeights(*stacks)], activation)
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    return [t.detach().cpu() for t in (y, *grads)]


@pytest.mark.parametrize("activation", [SwiGLU(), ClampedGLU()], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY)
def test_idle_experts_get_zeros(busy: list[int], activation: Any) -> None:
    got, wanted = train(DEVICE, busy, activation), train("cpu", busy, activation)
    idle = [e for e in range(EXPERTS) if e not in busy]
    for stack in got[3:]:
        assert torch.equal(stack[idle], torch.zeros_like(stack[idle]))
    for a, b in zip(got, wanted, strict=True):
        assert (a.float() - b.float()).abs().max() <= 5e-2 * max(float(b.float().abs().max()), 1e-3)


@pytest.mark.parametrize("policy", ["exact", "llep"])
def test_a_layer_on_poisoned_memory(policy: str) -> None:
    """The gate leaves out half of the experts; their gradients return through replicas and borrowed rows as zeros."""
    setup = make_borrowing_setup(4, dtype=torch.bfloat16, bias=True).to(DEVICE)
    setup.ids[:] = [ids.masked_fill(ids % 2 == 1, -1) for ids in setup.ids]
    how = LLEP if policy == "llep" else {"policy": policy}
    layer = setup.layer(LocalTransport(setup.placement.topology), **how)
    rows = setup.leaves()
    poison()
    y = layer(rows)
    poison()
    sum(row.float().square().sum() for row in y).backward()
    assert isinstance(layer, isoload.MoE) and all(torch.isfinite(row.grad).all() for row in rows if len(row))
    for held in layer.weights:
        idle = [i for i, expert in enumerate(held.layout.homes) if expert % 2]
        for parameter in held.parameters():
            assert torch.isfinite(parameter.grad).all()
            assert torch.equal(parameter.grad[idle], torch.zeros_like(parameter.grad[idle]))
