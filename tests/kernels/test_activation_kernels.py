"""The activation kernels against SwiGLU and ClampedGLU in float64, over ragged copies with a poisoned tail."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from isoload.kernels import activation as kernel
from isoload.weights.experts import ClampedGLU, SwiGLU

GLUS = {"swiglu": SwiGLU(), "clamped": ClampedGLU(), "clamped tightly": ClampedGLU(alpha=2, limit=1)}
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """C places of width I; slots end before these."""

    places: int
    width: int
    ends: tuple[int, ...]


CASES = {
    "one element": Case(1, 1, (1,)),
    "odd": Case(13, 7, (0, 4, 9)),
    "no tail": Case(12, 16, (5, 5, 12)),
    "one more than a tile": Case(3, 1025, (2,)),
    "several tiles": Case(3, 2880, (1, 3)),
    "many narrow rows": Case(700, 3, (600,)),
    "nothing present": Case(8, 16, (0, 0, 0)),
    "no places": Case(0, 16, (0, 0)),
    "no slots": Case(4, 16, ()),
    "no columns": Case(4, 0, (3,)),
}


def clamp_of(glu: SwiGLU | ClampedGLU) -> tuple[float, float] | None:
    return None if isinstance(glu, SwiGLU) else (glu.alpha, glu.limit)


def draw(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int]:
    """gate_up [C, 2I] and grad [C, I], nan and inf in the tail; ends; how many places hold copies."""
    generator = torch.Generator().manual_seed(case.places * 31 + case.width)
    gate_up = (6 * torch.randn(case.places, 2 * case.width, generator=generator)).to(dtype)
    grad = torch.randn(case.places, case.width, generator=generator).to(dtype)
    held = case.ends[-1] if case.ends else 0
    for tensor in (gate_up, grad):
        tensor[held:] = torch.nan
        tensor[held:, ::2] = torch.inf
    return gate_up, grad, torch.tensor(case.ends, dtype=torch.int32), held


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        got.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * largest
    )


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("glu", list(GLUS))
@pytest.mark.parametrize("name", list(CASES))
def test_both_directions(name: str, glu: str, dtype: torch.dtype) -> None:
    gate_up, grad, ends, held = draw(CASES[name], dtype)
    exact = gate_up[:held].double().requires_grad_()
    expected = GLUS[glu](exact)
    (to_gate_up,) = torch.autograd.grad(expected, exact, grad[:held].double())
    got = kernel.activate(gate_up, ends, clamp_of(GLUS[glu]))
    assert got.shape == grad.shape and got.dtype == dtype
    assert_close(got[:held], expected.detach(), dtype)
    back = kernel.activate_backward(grad, gate_up, ends, clamp_of(GLUS[glu]))
    assert back.shape == gate_up.shape and back.dtype == dtype
    assert_close(back[:held], to_gate_up, dtype)


@pytest.mark.parametrize("glu", list(GLUS))
@pytest.mark.parametrize("name", ["odd", "one more than a tile", "many narrow rows", "nothing present"])
def test_the_tail_is_not_touched(name: str, glu: str) -> None:
    gate_up, grad, ends, held = draw(CASES[name], torch.float32)
    for run, read, written in (
        (kernel._forward_kernel, [gate_up], torch.full_like(grad, 7)),
        (kernel._backward_kernel, [grad, gate_up], torch.full_like(gate_up, 7)),
    ):
        kernel._launch(run, read, ends, written, grad.shape[1], *kernel._clamped(clamp_of(GLUS[glu])))
        assert (written[held:] == 7).all() and not (written[:held] == 7).any()


def test_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PROGRAMS", 2)
    for name in ("several tiles", "many narrow rows"):
        test_both_directions(name, "swiglu", torch.float32)


@pytest.mark.parametrize("glu", list(GLUS))
def test_edges(glu: str) -> None:
    """At the clamps exactly, far out, and nan: what torch gives in float32, forward and backward."""
    values = torch.tensor([0.0, -0.0, 1, -1, 7, -7, 1.0000001, 80, -80, 1e30, -1e30, torch.nan])
    gate_up = torch.cartesian_prod(values, values)  # [144, 2]: I = 1, alike interleaved or halved
    leaf = gate_up.clone().requires_grad_()
    expected = GLUS[glu](leaf)
    (to_gate_up,) = torch.autograd.grad(expected, leaf, torch.ones(144, 1))
    ends, clamp = torch.tensor([144], dtype=torch.int32), clamp_of(GLUS[glu])
    got, back = kernel.activate(gate_up, ends, clamp), torch.ones(144, 1)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    back = kernel.activate_backward(back, gate_up, ends, clamp)
    torch.testing.assert_close(back, to_gate_up, rtol=1e-5, atol=1e-6, equal_nan=True)
