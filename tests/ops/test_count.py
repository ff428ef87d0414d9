"""count: copies per expert, masked entries left out, and their places; shared experts' columns added to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoload
import reference
from isoload import ops
from isoload.ops.results import PART_ROWS


@pytest.mark.parametrize("shape", [(), (17,), (3, 5, 2), (0, 2, 3)])
def test_counts_alone_are_of_any_shape(shape: tuple[int, ...]) -> None:
    ids = torch.from_numpy(np.asarray(np.random.default_rng(3).integers(-1, 7, shape)))
    counts = isoload.count(ids, 7)
    assert torch.equal(counts.long(), ids[ids >= 0].flatten().bincount(minlength=7))


def test_only_masked_entries() -> None:
    assert ops.count(torch.full((7, 2), -1), 5).counts.tolist() == [0] * 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [1, 3, 257, 1030, 5001])
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 8), (5, 0), (1, 1), (33, 8), (PART_ROWS, 2), (PART_ROWS + 1, 8), (3 * PART_ROWS - 1, 6)],
        (4097, 8),
        *[(2 * PART_ROWS, 9), (300, 40)],  # more choices than a block of a GPU takes at once
    ],
)
def test_equals_bincount_and_reference_and_a_copy_follows_its_number(
    shape: tuple[int, int], experts: int, dtype: torch.dtype
) -> None:
    ids = torch.from_numpy(np.random.default_rng([experts, *shape]).zipf(1.3, shape) % (experts + 1) - 1).to(
        dtype
    )
    mine, theirs = ops.count(ids, experts), reference.count(ids, experts)
    assert mine.ids is ids
    for name in ("counts", "numbers", "parts"):
        a, b = getattr(mine, name), getattr(theirs, name)
        assert a.dtype == b.dtype == torch.int32 and torch.equal(a, b), name
    assert torch.equal(mine.counts.long(), ids[ids >= 0].long().bincount(minlength=experts))
    for part, numbers in zip(ids.split(PART_ROWS), mine.numbers.split(PART_ROWS), strict=True):
        for e in range(min(experts, 4)):
            found = numbers[part == e]
            assert found.tolist() == list(range(len(found)))


@pytest.mark.parametrize("top_k", [8, 16, 40])
def test_where_all_copies_have_one_expert(top_k: int) -> None:
    ids = torch.full((2 * PART_ROWS + 1, top_k), 2)
    found = ops.count(ids, 5)
    whole, last = PART_ROWS * top_k, top_k
    assert found.parts[:, 2].tolist() == [whole, whole, last] and found.counts.tolist() == [
        0,
        0,
        ids.numel(),
        0,
        0,
    ]
    assert found.parts.sum() == ids.numel()
    assert found.numbers.flatten().tolist() == [*range(whole), *range(whole), *range(last)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_shared", [1, 3])
@pytest.mark.parametrize("experts", [3, 200, 257])
@pytest.mark.parametrize(
    "shape", [(0, 8), (5, 0), (1, 1), (PART_ROWS + 1, 7), (2 * PART_ROWS, 8), (300, 40), (1100, 8)]
)
def test_columns_equal_reference_and_numbers_of_all_columns(
    shape: tuple[int, int], experts: int, num_shared: int, dtype: torch.dtype
) -> None:
    """Rows without a choice among them; a few ids are counted by groups of experts, more by parts of the ids."""
    rng = np.random.default_rng([experts, *shape])
    ids = torch.from_numpy(rng.zipf(1.3, shape) % (experts + 1) - 1).to(dtype)
    ids[torch.from_numpy(rng.random(len(ids)) < 0.3)] = -1
    mine, theirs = ops.count(ids, experts, num_shared), reference.count(ids, experts, num_shared)
    assert mine.ids.dtype == dtype and torch.equal(mine.ids, theirs.ids)
    apart = ops.count(mine.ids, experts + num_shared)
    for name in ("counts", "numbers", "parts"):
        a, b = getattr(mine, name), getattr(theirs, name)
        assert a.dtype == torch.int32 and torch.equal(a, b) and torch.equal(a, getattr(apart, name)), name
