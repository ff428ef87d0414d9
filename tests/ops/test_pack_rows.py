"""pack_rows: every row with its token's values, the slots on its rank, and their weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.results import PackedRows, RowLayout, RowNumbers
from support.refusals import GOOD

SIZE = 3  # slots per rank


def draw(
    tokens: int, top_k: int, ranks: int, width: int = 7, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, RowNumbers]:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, ranks * SIZE, (tokens, top_k), generator=generator)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    weights = torch.rand(tokens, top_k, generator=generator)
    return x, slots, weights, ops.number_rows(slots, SIZE, ranks)


def parts(packed: PackedRows, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The payload's parts: bytes between them are anything."""
    return [*RowLayout.of(x, weights).parts(packed.payload, x, weights), *packed[1:]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 4), (1, 1), (5, 0), (63, 6)])
@pytest.mark.parametrize("capacity", [None, 64])
def test_equals_reference(tokens: int, top_k: int, dtype: torch.dtype, capacity: int | None) -> None:
    for ranks, width, ids, gate in (
        (1, 1, torch.int32, torch.float32),
        (5, 16, torch.int64, torch.float32),
        (20, 7, torch.int32, torch.float64),
        (5, 0, torch.int64, torch.float64),
    ):
        x, slots, weights, rows = draw(tokens, top_k, ranks, width, dtype)
        slots, weights = slots.to(ids), weights.to(gate)
        num_rows = ranks * capacity if capacity else int(rows.counts[0].sum())
        args = (x, slots, weights, rows, SIZE, num_rows, capacity)
        mine, theirs = (parts(f(*args), x, weights) for f in (ops.pack_rows, reference.pack_rows))
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), (ranks, width)


def test_more_ranks_than_a_block_finds_at_a_time() -> None:
    x, slots, weights, rows = draw(9, 40, 50)
    args = (x, slots, weights, rows, SIZE, int(rows.counts[0].sum()))
    mine, theirs = (parts(f(*args), x, weights) for f in (ops.pack_rows, reference.pack_rows))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_parts_are_aligned_views() -> None:
    for width, top_k, dtype in ((7, 3, torch.bfloat16), (5, 1, torch.float64), (1, 5, torch.float32)):
        x, weights = torch.zeros(2, width, dtype=dtype), torch.zeros(2, top_k)
        layout = RowLayout.of(x, weights)
        buffer = torch.zeros(4, layout.bytes, dtype=torch.uint8)
        for part in layout.parts(buffer, x, weights):
            assert 0 <= (at := part.data_ptr() - buffer.data_ptr()) < layout.bytes and at % part.itemsize == 0
            part.fill_(1)
        assert layout.bytes % 16 == 0


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            (12, 48, 64),
            r"slots_at must be a multiple of 4 and at least 32 \(the bytes of a row of x\), got 12",
        ),
        ((32, 44, 64), "weights_at must be a multiple of 4 and at least 48, got 44"),
        ((32, 48, 60), "bytes must be a multiple of 16 and at least 64, got 60"),
    ],
)
def test_refuses_a_layout(
    layout: tuple[int, int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowLayout, "of", lambda *_: RowLayout(*layout))
    with pytest.raises(ValueError, match=message):
        ops.pack_rows(**GOOD["pack_rows"][1])
