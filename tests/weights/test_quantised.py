"""MXFP8, MXFP4 and NVFP4 beside fp8: every number beside NumPy's, from its bits; products beside the dense experts'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload.ops.results import Grouping
from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU, compute_path
from isoload.weights.quantised import FP8, _at_once, _one_by_one, dequantise, quantised_linear
from reference import experts as dense_reference
from reference import quantised as reference
from support.quantised_experts import NAMES, open_quantised, random_quantised
from support.small_layer import close

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SIZES = [(64, 96), (40, 24), (6, 2)]  # H, I; the last blocks of most are cut short


def same(a: Tensor, b: Tensor) -> bool:
    """NaN beside NaN, and zeros of one sign."""
    numbers = ~a.isnan()
    alike = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[numbers], b[numbers])
    return a.dtype == b.dtype and alike and torch.equal(a[numbers].signbit(), b[numbers].signbit())


def exact(name: str, weight: Tensor, scale: Tensor, second: list[float]) -> Tensor:
    """By the reference, rounded once."""
    numbers = scale if name == "fp8" else scale.view(torch.uint8)
    found = reference.dequantise(name, weight.view(torch.uint8).numpy(), numbers.numpy(), second)
    with np.errstate(over="ignore"):
        return torch.from_numpy(found.astype(np.float32))


def every_scale(name: str) -> Tensor:
    """[256, 1] all bytes as scales."""
    every = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    return every.view(FP8) if name == "NVFP4" else every


@pytest.mark.parametrize("name", ["MXFP8", "MXFP4", "NVFP4"])
def test_every_number_under_every_scale(name: str) -> None:
    """All codes of e2m1 and e4m3, NaN among them; all of e8m0, 0 (2**-127) and 255 (NaN) among them."""
    if name == "MXFP8":
        weight = torch.arange(256, dtype=torch.uint8).view(8, 1, 32).expand(8, 256, 32).contiguous().view(FP8)
    else:  # all pairs of halves differ in their order
        pairs = torch.arange(256, dtype=torch.uint8).view(-1, 1, 16 if name == "MXFP4" else 8)
        weight = pairs.expand(-1, 256, -1).contiguous()
    for second in [[]] if name != "NVFP4" else [[1.0], [0.3], [1e-30, 3e38]]:
        scale_2 = torch.tensor(second) if second else None
        second = [] if scale_2 is None else scale_2.tolist()  # as float32 has them
        for matrix in weight:
            got = dequantise(matrix, every_scale(name), scale_2, dtype=torch.float32)
            assert same(got, exact(name, matrix, every_scale(name), second))
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                assert same(dequantise(matrix, every_scale(name), scale_2, dtype=dtype), got.to(dtype))


def test_the_numbers_of_the_formats() -> None:
    """As the specifications print them: largest, smallest, NaN."""
    assert [reference.e2m1(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [reference.e2m1(8 + code) for code in range(8)] == [-reference.e2m1(code) for code in range(8)]
    assert (reference.e4m3(0x7E), reference.e4m3(0x01), reference.e4m3(0x08)) == (448, 2.0**-9, 2.0**-6)
    assert all(np.isnan(reference.e4m3(byte)) for byte in (0x7F, 0xFF)) and np.isnan(reference.e8m0(255))
    assert (reference.e8m0(0), reference.e8m0(127), reference.e8m0(254)) == (2.0**-127, 1, 2.0**127)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_has_its_own_scale(name: str) -> None:
    """Sizes that no block divides; several matrices at once."""
    for hidden, inner in SIZES:
        weights = random_quantised(name, 3, hidden, inner, seed=hidden)
        wanted = open_quantised(name, weights, torch.float32)
        for of in ("gate_up", "down"):
            stacks = [getattr(weights, of + part) for part in ("", "_scale", "_scale_2")]
            got = dequantise(*stacks, dtype=torch.float32)
            assert torch.equal(got, getattr(wanted, of)) and got.any()


def made_batch(hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """23 rows; slot 2 of 5 has no copies, a fifth of the copies is absent."""
    random = torch.Generator().manual_seed(4)
    rows = torch.randn(23, hidden, generator=random).to(dtype)
    slots = torch.randint(0, 4, (23, 3), generator=random)
    slots = (slots + (slots >= 2)).masked_fill(torch.rand(23, 3, generator=random) < 0.2, -1)
    return rows, slots, torch.rand(23, 3, generator=random)


DENSE = ("gate_up", "down", "gate_up_bias", "down_bias")


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_dense_experts(
    name: str, dtype: torch.dtype, bias: torch.dtype | None
) -> None:
    for hidden, inner in SIZES:
        weights = random_quantised(name, 5, hidden, inner, 5, bias)
        dense = open_quantised(name, weights, dtype)
        rows, slots, gates = made_batch(hidden, dtype)
        assert compute_path(weights, dtype) == compute_path(dense)
        for activation in (SwiGLU(), ClampedGLU()):
            got = run_experts(rows, slots, gates, [weights], activation)
            want = run_experts(rows, slots, gates, [dense], activation)
            # MKL's last bits depend on where a matrix starts, and only a dense stack has several in a row
            aligned = all(stack[0].nbytes % 64 == 0 for stack in dense.stacks().values())
            assert torch.equal(got, want) if aligned else close(got, want, TOLERANCE[dtype])
        stacks = [None if s is None else s.double() for s in (getattr(dense, n) for n in DENSE)]
        wanted = dense_reference.run_experts(rows.double(), slots, gates.double(), *stacks)
        assert close(run_experts(rows, slots, gates, [weights], SwiGLU()), wanted, TOLERANCE[dtype])


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_all_at_once_as_on_a_device(name: str) -> None:
    weights = random_quantised(name, 4, 64, 48, 10)
    x, ends = torch.randn(11, 64).bfloat16(), torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    stacks = [s for s in (weights.gate_up, weights.gate_up_scale, weights.gate_up_scale_2) if s is not None]
    got = _at_once(x, stacks, ends)[:10]  # behind lies the tail
    assert torch.equal(got, _one_by_one(x, stacks, None, ends, True)[:10])
    with FakeTensorMode():  # whose values cannot be read: the host waits for nothing
        there = [torch.empty(s.shape, dtype=s.dtype, device="cuda") for s in stacks]
        fake = torch.empty(11, 64, dtype=torch.bfloat16, device="cuda")
        places = [torch.empty(11, dtype=torch.int64, device="cuda") for _ in range(2)]
        on_device = Grouping(
            *places, torch.empty(4, dtype=torch.int32, device="cuda"), places[0].unsqueeze(1)
        )
        bias = torch.empty(4, 96, device="cuda")
        got = quantised_linear(fake, there, bias, on_device, True)
        assert got.shape == (11, 96) and got.dtype == torch.bfloat16


MXFP4 = random_quantised("MXFP4", 2, 6, 4, 9, torch.float32).stacks()
NVFP4 = random_quantised("NVFP4", 2, 6, 4, 9).stacks()
MXFP8 = random_quantised("MXFP8", 2, 6, 4, 9).stacks()
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": (
        {**MXFP4, "down_scale": None},
        r"down_scale must be torch.uint8 \(MXFP4\) or torch.float8_e4m3fn \(NVFP4\) with down .*, got None",
    ),
    "e8m0 by torch's name": (
        {**MXFP8, "down_scale": MXFP8["down_scale"].view(torch.float8_e8m0fnu)},
        r"down_scale must be .* torch.uint8 \(MXFP8\) with .* got \[2, 6, 1\] torch.float8_e8m0fnu",
    ),
    "scales of half a format": (
        {**NVFP4, "gate_up_scale": NVFP4["gate_up_scale"].view(torch.uint8)},
        r"gate_up_scale must be \[2, 8, 1\] torch.float8_e4m3fn .* got \[2, 8, 1\] torch.uint8",
    ),
    "no scale of the matrix": (
        {**NVFP4, "gate_up_scale_2": None},
        r"gate_up_scale_2 must be \[2, 2\] torch.float32 cpu with .* got None",
    ),
    "one scale for gate and up": (
        {**NVFP4, "gate_up_scale_2": torch.ones(2, 1)},
        r"gate_up_scale_2 must be \[2, 2\] torch.float32 cpu with .* got \[2, 1\]",
    ),
    "a scale of the matrix too many": (
        {**MXFP4, "down_scale_2": torch.ones(2, 1)},
        r"down_scale_2 must be None with down .* got \[2, 1\] torch.float32 cpu",
    ),
    "blocks of 16 in MXFP4": (
        {**MXFP4, "gate_up_scale": torch.ones(2, 8, 2, dtype=torch.uint8)},
        r"gate_up_scale must be \[2, 8, 1\] torch.uint8 cpu with .* got \[2, 8, 2\]",
    ),
    "an odd H": (
        {**MXFP4, "down": torch.ones(2, 5, 2, dtype=torch.uint8)},
        r"down must have an even number of rows H in torch.uint8, got \[2, 5, 2\]",
    ),
    "as many bytes as values": (
        {**MXFP4, "gate_up": torch.ones(2, 8, 6, dtype=torch.uint8)},
        r"gate_up must be \[2, 8, 3\] torch.uint8 cpu with down \[2, 6, 2\] .* got \[2, 8, 6\]",
    ),
    "bias in bytes": (
        {**MXFP4, "down_bias": torch.ones(2, 6, dtype=torch.uint8)},
        r"down_bias must be \[2, 6\] torch.float64 or .* with .* got \[2, 6\] torch.uint8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_weights(name: str) -> None:
    stacks, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ExpertWeights(**stacks)
