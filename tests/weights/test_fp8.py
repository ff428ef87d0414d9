"""Weights in fp8 are multiplied as what they stand for: to the bit where the kernel is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU, compute_path
from isoload.weights.quantised import FP8, _at_once, _one_by_one, dequantise
from reference import experts as reference
from support.fp8_experts import open_experts, open_matrix, quantise, quantise_matrix, random_experts
from support.small_layer import close

# of the largest element, against float64 products of the same rows with the dequantised weights in this dtype
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SIZES = [(256, 128), (200, 136), (129, 7), (16, 300), (1, 1)]  # H, I
DTYPES = list(TOLERANCE)


def draw(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sizes", [(1, 1), (128, 128), (129, 127), (300, 5), (5, 257)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_block_has_its_own_scale(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    values, scale = quantise_matrix(torch.randn(sizes, generator=draw(1)) * 3)
    scale.mul_(torch.rand(scale.shape, generator=draw(2)) * 9 + 0.5)
    wanted = open_matrix(values, scale, dtype)
    assert dequantise(values, scale, dtype=dtype).dtype == dtype
    assert torch.equal(dequantise(values, scale, dtype=dtype), wanted)
    several = dequantise(torch.stack([values] * 3), torch.stack([scale, scale * 2, scale]), dtype=dtype)
    assert torch.equal(several[1], open_matrix(values, scale * 2, dtype)) and torch.equal(several[2], wanted)


def test_all_values_of_e4m3() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 128)
    opened = dequantise(values, torch.tensor([[0.125]]), dtype=torch.float32)
    assert torch.equal(opened.isnan(), values.isnan()) and int(opened.isnan().sum()) == 2
    finite = ~values.isnan()
    assert torch.equal(opened[finite], values.float()[finite] / 8)


@pytest.mark.parametrize("sizes", [(256, 384), (128, 100), (300, 128)], ids=str)
def test_as_transformers_dequantises(sizes: tuple[int, int]) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, scale = quantise_matrix(torch.randn(sizes, generator=draw(3)))
    ours = dequantise(values, scale, dtype=torch.float32)
    assert torch.equal(ours, fp8._dequantize_fp8_weight(values, scale, [128, 128], torch.float32))
    if sizes == (256, 384):  # its other function has no blocks that are cut short
        for dtype in (torch.float32, torch.bfloat16):
            theirs = fp8.Fp8Dequantize(None)._dequantize_one(values, scale, dtype)
            assert torch.equal(dequantise(values, scale, dtype=dtype), theirs)


def made_batch(hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """23 rows; slot 2 of 5 has no copies, a fifth of the copies is absent."""
    random = draw(4)
    rows = torch.randn(23, hidden, generator=random).to(dtype)
    slots = torch.randint(0, 4, (23, 3), generator=random)
    slots = (slots + (slots >= 2)).masked_fill(torch.rand(23, 3, generator=random) < 0.2, -1)
    return rows, slots, torch.rand(23, 3, generator=random)


@torch.no_grad()
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_dequantised_weights(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    weights = random_experts(5, *sizes, draw(5))
    rows, slots, gates = made_batch(sizes[0], dtype)
    dense = open_experts(weights, dtype)
    for activation in (SwiGLU(), ClampedGLU()):
        for max_copies in (None, [int((slots >= 0).sum())]):
            got = run_experts(rows, slots, gates, [weights], activation, max_copies)
            want = run_experts(rows, slots, gates, [dense], activation, max_copies)
            # MKL's last bits depend on where a matrix starts, and only a dense stack has several in a row
            aligned = all(stack[0].nbytes % 64 == 0 for stack in dense.stacks().values())
            assert torch.equal(got, want) if aligned else close(got, want, TOLERANCE[dtype])
    exact = reference.run_experts(
        rows.double(), slots, gates.double(), dense.gate_up.double(), dense.down.double(), None, None
    )
    assert close(run_experts(rows, slots, gates, [weights], SwiGLU()), exact, TOLERANCE[dtype])
    assert compute_path(weights, dtype) == compute_path(dense)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_at_once_as_on_a_device(dtype: torch.dtype) -> None:
    weights = random_experts(4, 128, 48, draw(10))
    x, ends = (
        torch.randn(11, 128, generator=draw(11)).to(dtype),
        torch.tensor([3, 3, 8, 10], dtype=torch.int32),
    )
    stacks = [weights.gate_up, weights.gate_up_scale]
    got = _at_once(x, stacks, ends)[:10]  # behind lies the tail
    assert torch.equal(got, _one_by_one(x, stacks, None, ends, True)[:10])


def test_on_a_device_the_host_waits_for_nothing() -> None:
    """A fake device's values cannot be read."""
    with FakeTensorMode():
        x, ends = (
            torch.empty(7, 256, dtype=torch.bfloat16, device="cuda"),
            torch.empty(4, dtype=torch.int32, device="cuda"),
        )
        weight, scale = (
            torch.empty(4, 96, 256, dtype=FP8, device="cuda"),
            torch.empty(4, 2, 1, 2, device="cuda"),
        )
        assert _at_once(x, [weight, scale], ends).shape == (7, 96)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_device(dtype: torch.dtype) -> None:
    weights = random_experts(5, 256, 128, draw(12))
    rows, slots, gates = made_batch(256, dtype)
    there = ExpertWeights(**{name: stack.cuda() for name, stack in weights.stacks().items()})
    got = run_experts(rows.cuda(), slots.cuda(), gates.cuda(), [there], SwiGLU())
    assert close(got.cpu(), run_experts(rows, slots, gates, [weights], SwiGLU()), TOLERANCE[dtype])


@torch.no_grad()
def test_several_groups_and_empty_ones() -> None:
    weights = random_experts(5, 136, 200, draw(6))
    rows, slots, gates = made_batch(136, torch.bfloat16)
    parts = [
        ExpertWeights(**{n: s[a:b] for n, s in weights.stacks().items()}) for a, b in ((0, 3), (3, 3), (3, 5))
    ]
    dense = open_experts(weights, torch.bfloat16)
    denses = [ExpertWeights(dense.gate_up[a:b], dense.down[a:b]) for a, b in ((0, 3), (3, 3), (3, 5))]
    got, want = (run_experts(rows, slots, gates, groups, SwiGLU()) for groups in (parts, denses))
    assert torch.equal(got, want)
    for present in (slots[:0], torch.full_like(slots, -1)):
        assert not run_experts(rows[: len(present)], present, gates[: len(present)], parts, SwiGLU()).any()


@torch.no_grad()
def test_one_expert_is_dequantised_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def noting(weight: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
        opened.append(tuple(weight.shape))
        return dequantise(weight, scale, dtype=dtype)

    monkeypatch.setattr("isoload.weights.quantised.dequantise", noting)
    weights = random_experts(5, 128, 64, draw(7))
    rows, slots, gates = made_batch(128, torch.bfloat16)
    run_experts(rows, slots, gates, [weights], SwiGLU())
    assert opened == [(128, 128)] * 4 + [(128, 64)] * 4  # not slot 2, which has no copies


STACKS = random_experts(2, 6, 4, torch.Generator().manual_seed(9)).stacks()
REFUSED = {
    "no scale": (
        {"down_scale": None},
        r"down_scale must be torch.float32 \(fp8\) or torch.uint8 \(MXFP8\) with down .* got None",
    ),
    "shape": (
        {"gate_up_scale": torch.ones(2, 2, 2, 1)},
        r"gate_up_scale must be \[2, 2, 1, 1\] torch.float32 cpu with down .* got \[2, 2, 2, 1\]",
    ),
    "dtype": (
        {"down_scale": torch.ones(2, 1, 1).bfloat16()},
        r"down_scale must be torch.float32 \(fp8\) or .* got \[2, 1, 1\] torch.bfloat16",
    ),
    "another dtype": (
        {"gate_up_scale": torch.ones(2, 2, 1, 1).bfloat16()},
        r"gate_up_scale must be \[2, 2, 1, 1\] torch.float32 cpu with .* got \[2, 2, 1, 1\] torch.bfloat16",
    ),
    "one scale": (
        {"gate_up_scale": None},
        r"gate_up_scale must be \[2, 2, 1, 1\] torch.float32 cpu with .* got None",
    ),
    "half fp8": (
        {"gate_up": torch.ones(2, 8, 6)},
        r"gate_up must be \[2, 8, 6\] torch.float8_e4m3fn cpu with .* got \[2, 8, 6\] torch.float32",
    ),
    "not fp8": (
        {"gate_up": torch.ones(2, 8, 6), "down": torch.ones(2, 6, 4)},
        r"gate_up_scale must be None with down \[2, 6, 4\] torch.float32 .* got \[2, 2, 1, 1\] torch.float32",
    ),
    "a scale of matrices": (
        {"down_scale_2": torch.ones(2, 1)},
        r"down_scale_2 must be None with .* got \[2, 1\] torch.float32 cpu",
    ),
    "e5m2": (
        {"down": torch.ones(2, 6, 4).to(torch.float8_e5m2)},
        "down must be float64, .* float8_e4m3fn or uint8 of e2m1, got torch.float8_e5m2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_weights_in_fp8(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ExpertWeights(**{**STACKS, **changes})


def test_refused_rows() -> None:
    weights = ExpertWeights(**STACKS)
    slots, gates = torch.zeros(3, 1).long(), torch.ones(3, 1)
    with pytest.raises(
        ValueError, match=r"quantised experts must run under torch.no_grad\(\) .* got gradients recorded"
    ):
        run_experts(torch.ones(3, 6), slots, gates, [weights], SwiGLU())
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"rows must be \[N, 6\] .*torch.bfloat16.*, got .* torch.int32"),
    ):
        run_experts(torch.ones(3, 6).int(), slots, gates, [weights], SwiGLU())
    plain = quantise(ExpertWeights.random(2, 6, 4))
    with torch.inference_mode():
        run_experts(torch.ones(3, 6), slots, gates, [plain], SwiGLU())
