"""The permutation kernels give the bits of their torch twins, and read nothing where no copy lies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from isoload.kernels import permutation as kernel
from isoload.ops import counting as twin

DTYPES = [torch.float32, torch.float16]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """N rows of width H, K copies at most, how many of them absent, and places that no copy takes."""

    rows: int
    width: int
    top_k: int
    absent: float = 0.5
    unused: int = 0


CASES = {
    "one element": Case(1, 1, 1, absent=0),
    "odd": Case(13, 7, 3, unused=4),
    "a power of two": Case(33, 64, 4),
    "one more than a tile": Case(3, 1025, 2, unused=1),
    "three tiles, the last cut": Case(2, 2880, 4, absent=0),
    "many narrow rows": Case(1500, 1, 2),
    **{f"K = {k}": Case(9, 24, k, absent=0.3, unused=2) for k in range(1, 9)},
    "all absent": Case(5, 16, 3, absent=1.1, unused=6),
    "none absent": Case(17, 40, 8, absent=0),
    "no rows": Case(0, 16, 4),
    "no copies per row": Case(5, 16, 0),
    "no places": Case(5, 16, 2, absent=1.1),
    "no columns": Case(5, 0, 2),
}


class Drawn:
    """A case's tensors. Unused places hold nan and inf, and so do the weights of absent copies."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(len(repr(case)) + case.rows)
        self.there = torch.rand(case.rows, case.top_k, generator=draw) >= case.absent
        used = int(self.there.sum())
        num_places = used + case.unused
        taken = torch.randperm(num_places, generator=draw)[:used]
        self.position = torch.full(self.there.shape, num_places)
        self.position[self.there] = taken
        self.used = torch.zeros(num_places, dtype=torch.bool)
        self.used[taken] = True
        self.copy = torch.zeros(num_places, dtype=torch.int64)
        self.copy[taken] = self.there.flatten().nonzero().flatten()
        self.source = (self.copy // max(case.top_k, 1)).where(self.used, case.rows)
        self.rows = torch.randn(case.rows, case.width, generator=draw).to(dtype)
        self.copies = torch.randn(num_places, case.width, generator=draw).to(dtype)
        self.copies[~self.used] = (
            torch.tensor([torch.nan, torch.inf]).to(dtype).repeat(case.width)[: case.width]
        )
        self.weights = torch.rand(self.there.shape, generator=draw).where(self.there, torch.nan)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=list(CASES))
def drawn(request: pytest.FixtureRequest, dtype: torch.dtype) -> Drawn:
    return Drawn(CASES[request.param], dtype)


def assert_bits(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * max(largest, 1))


def test_spread(drawn: Drawn) -> None:
    """Unpadded, the twin's source must be a row wherever a place is read."""
    padded = kernel.spread_rows(drawn.rows, drawn.position, len(drawn.copy), True)
    assert_bits(padded, twin.spread_rows(drawn.rows, drawn.position, drawn.source, True))
    got = kernel.spread_rows(drawn.rows, drawn.position, len(drawn.copy), False)
    assert got.shape == padded.shape
    assert_bits(got[drawn.used], padded[drawn.used])
    assert_bits(padded[~drawn.used], torch.zeros_like(padded[~drawn.used]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_sum(drawn: Drawn, dtype: torch.dtype, weighted: bool, rounded: bool) -> None:
    weights, to = drawn.weights if weighted else None, dtype if rounded else torch.float32
    got = kernel.sum_rows([(drawn.copies, drawn.position)], weights, to)
    assert got.dtype == to and got.isfinite().all()
    assert_bits(got, twin.sum_rows(drawn.copies, drawn.position, weights, to))
    exact = twin.sum_rows(
        drawn.copies.double(), drawn.position, weights if weights is None else weights.double()
    )
    assert_close(got, exact, TOLERANCES[to])


@pytest.mark.parametrize("num_parts", [2, 3])
def test_sum_of_copies_in_several_places(drawn: Drawn, dtype: torch.dtype, num_parts: int) -> None:
    """The bits of the sum over all of them in one place."""
    whole = twin.sum_rows(drawn.copies, drawn.position, drawn.weights, dtype)
    ends = [len(drawn.copies) * part // num_parts for part in range(num_parts + 1)]
    parts = []
    for start, end in pairwise(ends):
        position = drawn.position.sub(start).where(
            (drawn.position >= start) & (drawn.position < end), end - start
        )
        parts.append((drawn.copies[start:end], position))
    for order in (parts, parts[::-1]):
        assert_bits(kernel.sum_rows(order, drawn.weights, dtype), whole)
        assert_bits(twin.sum_rows(*order[0], drawn.weights, dtype, order[1:]), whole)


@pytest.mark.parametrize("rounded", [False, True])
def test_sum_backward(drawn: Drawn, dtype: torch.dtype, rounded: bool) -> None:
    grad = drawn.rows if rounded else drawn.rows.float() / 3
    given = (drawn.copies, drawn.weights, drawn.position)
    to_copies, to_weights = kernel.sum_rows_backward(grad, *given)
    expected_copies, expected_weights = twin.sum_rows_backward(grad, *given, drawn.copy)
    assert to_copies.dtype == dtype and to_weights.dtype == torch.float32
    assert_bits(to_copies[drawn.used], expected_copies[drawn.used])
    assert_close(to_weights, expected_weights.double(), 1e-5)  # a dot product, in another order
    assert_bits(to_weights[~drawn.there], torch.zeros_like(to_weights[~drawn.there]))


def test_sum_backward_is_the_gradient_of_the_sum() -> None:
    """Independent of the twins: autograd through a dense float64 product."""
    drawn = Drawn(CASES["odd"], torch.float32)
    one_hot = torch.nn.functional.one_hot(drawn.position, len(drawn.copy) + 1)[..., :-1].double()
    leaves = [drawn.copies.nan_to_num(0, 0).double(), drawn.weights.nan_to_num(0).double()]
    copies, weights = (leaf.requires_grad_() for leaf in leaves)
    total = torch.einsum("nkc,nk,ch->nh", one_hot, weights, copies)
    assert_close(
        kernel.sum_rows([(drawn.copies, drawn.position)], drawn.weights, torch.float32), total.detach(), 1e-6
    )
    to_copies, to_weights = torch.autograd.grad(total, [copies, weights], drawn.rows.double())
    got = kernel.sum_rows_backward(drawn.rows, drawn.copies, drawn.weights, drawn.position)
    assert_close(got[0][drawn.used], to_copies[drawn.used], 1e-6)
    assert_close(got[1], to_weights, 1e-6)


@pytest.mark.parametrize("rows", [torch.randn(7, 13).t(), torch.randn(13, 1).expand(13, 7)])
def test_spread_of_rows_with_gaps(rows: Tensor) -> None:
    drawn = Drawn(CASES["odd"], torch.float32)
    assert rows.stride(1) != 1
    got = kernel.spread_rows(rows, drawn.position, len(drawn.copy), True)
    assert_bits(got, kernel.spread_rows(rows.contiguous(), drawn.position, len(drawn.copy), True))


def test_gradients_that_are_no_plain_rows() -> None:
    """sum() sends stride 0, a transposition strides of its own."""
    drawn = Drawn(CASES["odd"], torch.float32)
    flat = torch.ones(1, 1).expand(13, 7)
    assert_bits(
        kernel.spread_rows(flat, drawn.position, len(drawn.copy), True),
        kernel.spread_rows(flat.contiguous(), drawn.position, len(drawn.copy), True),
    )
    turned, weights, position = (
        t.t().contiguous().t() for t in (drawn.copies, drawn.weights, drawn.position)
    )
    assert not (turned.is_contiguous() or weights.is_contiguous() or position.is_contiguous())
    to_copies, to_weights = kernel.sum_rows_backward(flat, turned, weights, position)
    expected = kernel.sum_rows_backward(flat, drawn.copies, drawn.weights, drawn.position)
    assert_bits(to_copies[drawn.used], expected[0][drawn.used])
    assert_bits(to_weights, expected[1])
    assert_bits(
        kernel.sum_rows([(turned, position)], weights, torch.float32),
        kernel.sum_rows([(drawn.copies, drawn.position)], drawn.weights, torch.float32),
    )
