"""With the kernels in their places, the experts and the exchanges give what they give in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload import kernels
from isoload.kernels import activation, permutation
from isoload.transport import LocalTransport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU

LAUNCHERS = [(permutation, name) for name in ("spread_rows", "sum_rows", "sum_rows_backward")]
LAUNCHERS += [(activation, name) for name in ("activate", "activate_backward", "add_bias")]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Takes CPU tensors for CUDA's; the names of the launchers that ran."""
    names: set[str] = set()

    def noted(name: str, launch: Any) -> Any:
        def run(*args: Any) -> Any:
            names.add(name)
            return launch(*args)

        return run

    for module, name in LAUNCHERS:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    return names


def both_ways(monkeypatch: pytest.MonkeyPatch, call: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What a call returns in plain torch, then by the kernels."""
    plain = call()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "fit", lambda *tensors: all(t.dtype in kernels.DTYPES for t in tensors))
        return plain, call()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("glu", [SwiGLU(), ClampedGLU()], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_experts(
    monkeypatch: pytest.MonkeyPatch, launched: set[str], dtype: torch.dtype, glu: Any, num_groups: int
) -> None:
    draw = torch.Generator().manual_seed(num_groups)
    stacks = [
        ExpertWeights.random(3, 16, 24, bias=True, generator=draw, dtype=dtype) for _ in range(num_groups)
    ]
    slots = torch.randint(-3, 3 * num_groups, (21, 4), generator=draw).clamp(min=-1)
    values = [torch.randn(21, 16, generator=draw).to(dtype), torch.rand(21, 4, generator=draw)]

    def call() -> list[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in (*values, *(s.gate_up for s in stacks))]
        groups = [replace(stack, gate_up=leaf) for stack, leaf in zip(stacks, leaves[2:], strict=True)]
        y = run_experts(leaves[0], slots, leaves[1], groups, glu)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]

    plain, fused = both_ways(monkeypatch, call)
    assert launched == {name for _, name in LAUNCHERS}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for expected, got in zip(plain, fused, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )


@pytest.mark.parametrize("capacity", [None, 7])
def test_exchanges_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, launched: set[str], capacity: int | None
) -> None:
    draw = torch.Generator().manual_seed(3)
    slots = [torch.randint(-2, 8, (tokens, 3), generator=draw).clamp(min=-1) for tokens in (7, 0, 5, 1)]
    x = [torch.randn(len(s), 10, generator=draw) for s in slots]
    weights = [torch.rand(s.shape, generator=draw) for s in slots]

    def call() -> list[Tensor]:
        transport = LocalTransport(isoload.Topology(4), max_tokens_per_rank=capacity)
        leaves = [leaf.clone().requires_grad_() for leaf in (*x, *weights)]
        received = transport.dispatcher.dispatch(leaves[:4], slots, leaves[4:], 2)
        y = transport.dispatcher.combine(
            [r.rows * r.weights.sum(1, keepdim=True) for r in received], received
        )
        loss = sum((row.square().sum() for row in y), torch.zeros(()))
        tensors = [t.detach() for r in received for t in (r.rows, r.slots, r.weights)]
        return [*tensors, *(row.detach() for row in y), *torch.autograd.grad(loss, leaves)]

    plain, fused = both_ways(monkeypatch, call)
    assert launched == {"spread_rows", "sum_rows"}
    for expected, got in zip(plain, fused, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
