"""The Triton kernels on a GPU, in every dtype, against their torch twins on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isoload import kernels
from isoload.ops import group_copies
from isoload.ops.counting import gather_copies, weighted_sum
from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {  # N, H, K
    "aligned": (300, 2048, 4),
    "three tiles, the last cut": (65, 2880, 8),
    "odd": (77, 333, 3),
    "narrow": (1000, 8, 2),
    "no rows": (0, 64, 4),
}


@pytest.fixture(params=list(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def both_ways(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], list[Tensor]]
) -> zip[tuple[Tensor, Tensor]]:
    """What a call gives in plain torch and by the kernels, which must have been chosen."""
    assert kernels.fit(torch.zeros(1, device="cuda")), kernels.why_not()
    fused = call()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "fit", lambda *_: False)
        return zip(call(), fused, strict=True)


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(largest, 1))


def draw(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [N, H], slots [N, K] of which some are absent, weights [N, K]."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    options: dict[str, Any] = {"generator": generator, "device": "cuda"}
    rows, width, top_k = shape
    slots = torch.randint(-4, 6, (rows, top_k), **options).clamp(min=-1)
    return torch.randn(rows, width, **options).to(dtype), slots, torch.rand(rows, top_k, **options)


@pytest.mark.parametrize("name", list(SHAPES))
def test_permutation_there_and_back(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    rows, slots, weights = draw(SHAPES[name], dtype)
    grouping = group_copies(slots, 0, 6)
    held = int((slots >= 0).sum())

    def call() -> list[Tensor]:
        leaves = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
        copies = gather_copies(leaves[0], grouping)
        copies.data[held:] = torch.nan  # the tail
        total = weighted_sum([(copies, grouping)], leaves[1])
        grads = torch.autograd.grad(total.square().sum(), leaves)
        return [copies[:held].detach(), total.detach(), *grads]

    *bits, plain_dots, dots = (t for pair in both_ways(monkeypatch, call) for t in pair)
    for expected, got in zip(bits[::2], bits[1::2], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert_close(dots, plain_dots, 1e-5)  # a dot product, in another order


@pytest.mark.parametrize("glu", [SwiGLU(), ClampedGLU()], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_experts(monkeypatch: pytest.MonkeyPatch, glu: Any, num_groups: int, dtype: torch.dtype) -> None:
    rows, slots, weights = draw((200, 256, 4), dtype)
    options: dict[str, Any] = {"bias": True, "dtype": dtype, "device": "cuda"}
    generator = torch.Generator("cuda").manual_seed(num_groups)
    size = 6 // num_groups
    stacks = [ExpertWeights.random(size, 256, 384, generator=generator, **options) for _ in range(num_groups)]

    def call() -> list[Tensor]:
        leaves = [rows.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = run_experts(leaves[0], slots, leaves[1], stacks, glu)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]

    for expected, got in both_ways(monkeypatch, call):
        assert_close(got, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("glu", [SwiGLU(), ClampedGLU()], ids=["swiglu", "clamped"])
def test_activation_against_float64(glu: Any, dtype: torch.dtype) -> None:
    from isoload.kernels import activation

    clamp = None if isinstance(glu, SwiGLU) else (glu.alpha, glu.limit)
    ends = torch.tensor([3, 70, 70, 150], dtype=torch.int32, device="cuda")
    for width in (2880, 333, 8):
        gate_up = 6 * torch.randn(200, 2 * width, device="cuda").to(dtype)
        grad = torch.randn(200, width, device="cuda").to(dtype)
        gate_up[150:], grad[150:] = torch.nan, torch.inf
        gate_up[7], gate_up[9, 0] = torch.nan, torch.nan  # must show
        exact = gate_up[:150].double().requires_grad_()
        expected = glu(exact)
        (to_gate_up,) = torch.autograd.grad(expected, exact, grad[:150].double())
        got = activation.activate(gate_up, ends, clamp)[:150]
        back = activation.activate_backward(grad, gate_up, ends, clamp)[:150]
        for result, wanted in ((got, expected.detach()), (back, to_gate_up)):
            assert torch.equal(result.isnan(), wanted.isnan())
            assert_close(result.double().nan_to_num(), wanted.nan_to_num(), TOLERANCES[dtype])


def test_no_kernel_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, slots, weights = draw(SHAPES["aligned"], torch.bfloat16)
    from isoload.kernels import activation, permutation

    def call() -> None:
        grouping = group_copies(slots, 0, 6)
        copies = permutation.spread_rows(rows, grouping.position, len(grouping.copy), False)
        activation.add_bias(
            copies, torch.zeros(6, copies.shape[1], device="cuda"), grouping.slot, grouping.ends
        )
        inner = activation.activate(copies, grouping.ends, None)
        activation.activate_backward(inner, copies, grouping.ends, None)
        total = permutation.sum_rows([(copies, grouping.position)], weights, torch.bfloat16)
        permutation.sum_rows_backward(total, copies, weights, grouping.position)

    call()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
