"""Expert weights: their shapes, the activations between them, and the path they are multiplied by."""

from __future__ import annotations

import pytest
import torch

from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU, compute_path
from reference import experts as reference

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_glu_is_clamped(dtype):
    gate_up = torch.tensor([9.0, 9.0, -9.0, -9.0, 7.5, 1.0, 2.0, -7.5], dtype=dtype)
    expected = reference.activate(gate_up.double(), (1.702, 7.0))
    torch.testing.assert_close(ClampedGLU()(gate_up), expected.to(dtype))
    assert expected[0] == pytest.approx(8 * 7 / (1 + 2.718281828459045 ** (-1.702 * 7)))


@pytest.mark.parametrize(
    "hidden, inner, dtype, path",
    [
        (8, 16, torch.float32, "grouped_mm"),
        (8, 16, torch.bfloat16, "grouped_mm"),
        (8, 16, torch.float64, "loop"),  # grouped_mm has none
        (4, 16, torch.bfloat16, "loop"),  # rows of H take 8 bytes, no multiple of 16
        (8, 3, torch.float32, "loop"),  # those of I take 12
    ],
)
def test_dtype_and_rows_choose_the_path(hidden, inner, dtype, path):
    assert compute_path(ExpertWeights.random(2, hidden, inner, dtype=dtype)) == path


def test_strided_stacks_take_the_loop():
    whole = ExpertWeights.random(3, 16, 24)
    strided = ExpertWeights(torch.cat([whole.gate_up, whole.gate_up], 2)[:, :, ::2], whole.down)
    assert compute_path(strided) == "loop"


def test_transposed_stacks_need_no_copy():
    """gpt-oss stores [S, in, out]: its views are multiplied in place, gradients included."""
    torch.manual_seed(6)
    whole = ExpertWeights.random(3, 16, 24)
    turned = ExpertWeights(whole.gate_up.mT.contiguous().mT, whole.down.mT.contiguous().mT)
    assert not turned.down.is_contiguous() and compute_path(turned) == "grouped_mm"
    rows, slots, gates = torch.randn(9, 16), torch.randint(-1, 3, (9, 2)), torch.rand(9, 2)
    results = []
    for stack in (turned, whole):
        leaves = [stack.gate_up.requires_grad_(), stack.down.requires_grad_()]
        y = run_experts(rows, slots, gates, [stack], SwiGLU())
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    torch.testing.assert_close(*results)


REFUSED_WEIGHTS = {
    "down": ({"down": torch.zeros(4, 6)}, r"down must be \[S, H, I\], got \[4, 6\]"),
    "dtype": (
        {"down": torch.zeros(2, 6, 4).int()},
        "down must be float64, .* float8_e4m3fn or uint8 of e2m1, got torch.int32",
    ),
    "gate_up": (
        {"gate_up": torch.zeros(2, 8, 5)},
        r"gate_up must be \[2, 8, 6\] torch.float32 cpu with down \[2, 6, 4\] .*, got \[2, 8, 5\]",
    ),
    "gate_up_bias": (
        {"gate_up_bias": torch.zeros(2, 4)},
        r"gate_up_bias must be \[2, 8\] torch.float32 cpu with down .*, got \[2, 4\]",
    ),
    "down_bias": ({"down_bias": torch.zeros(2, 4)}, r"down_bias must be \[2, 6\] .* got \[2, 4\]"),
    "mixed dtypes": (
        {"gate_up": torch.zeros(2, 8, 6).half()},
        r"gate_up must be \[2, 8, 6\] torch.float32 cpu with .*, got \[2, 8, 6\] torch.float16 cpu",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED_WEIGHTS))
def test_refused_weights(name):
    changes, message = REFUSED_WEIGHTS[name]
    with pytest.raises(ValueError, match=message):
        ExpertWeights(**({"gate_up": torch.zeros(2, 8, 6), "down": torch.zeros(2, 6, 4)} | changes))
