"""count: copies per expert, masked entries left out; count_numbered: their places, too; count_columns: shared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isoload import ops, reference
from isoload.results import PART_ROWS


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [1, 3, 64, 257, 1030])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (33, 8), (4001, 6), (4097, 8), (17,), (3, 5, 2), ()])
def test_equals_bincount_and_reference(shape: tuple[int, ...], experts: int, dtype: torch.dtype) -> None:
    ids = np.random.default_rng([experts, *shape]).integers(-1, experts, shape)
    topk_ids = torch.from_numpy(np.asarray(ids)).to(dtype)
    counts = ops.count(topk_ids, experts)
    assert counts.dtype == torch.int32 and counts.shape == (experts,)
    assert counts.tolist() == np.bincount(ids[ids >= 0].ravel(), minlength=experts).tolist()
    assert torch.equal(counts, reference.count(topk_ids, experts))


def test_only_masked_entries() -> None:
    assert ops.count(torch.full((7, 2), -1), 5).tolist() == [0] * 5


def test_input_need_not_be_contiguous() -> None:
    ids = torch.arange(60).view(6, 10) % 7
    assert torch.equal(ops.count(ids[:, ::3], 7), ops.count(ids[:, ::3].contiguous(), 7))
    assert torch.equal(ops.count(ids.t(), 7), ops.count(ids, 7))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [1, 3, 257, 1030, 5001])
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 8), (5, 0), (1, 1), (PART_ROWS, 2), (PART_ROWS + 1, 8), (3 * PART_ROWS - 1, 6), (4097, 8)],
        *[(2 * PART_ROWS, 9), (300, 40)],  # more choices than a block of a GPU takes at once
    ],
)
def test_numbered_equals_reference_and_a_copy_follows_its_number(
    shape: tuple[int, int], experts: int, dtype: torch.dtype
) -> None:
    ids = torch.from_numpy(np.random.default_rng([experts, *shape]).zipf(1.3, shape) % (experts + 1) - 1).to(
        dtype
    )
    mine, theirs = ops.count_numbered(ids, experts), reference.count_numbered(ids, experts)
    for name in mine._fields:
        a, b = getattr(mine, name), getattr(theirs, name)
        assert a.dtype == b.dtype == torch.int32 and torch.equal(a, b), name
    assert torch.equal(mine.counts, ops.count(ids, experts))
    for part, numbers in zip(ids.split(PART_ROWS), mine.numbers.split(PART_ROWS), strict=True):
        for e in range(min(experts, 4)):
            found = numbers[part == e]
            assert found.tolist() == list(range(len(found)))


@pytest.mark.parametrize("top_k", [8, 16, 40])
def test_numbered_where_all_copies_have_one_expert(top_k: int) -> None:
    ids = torch.full((2 * PART_ROWS + 1, top_k), 2)
    found = ops.count_numbered(ids, 5)
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


def test_numbered_input_need_not_be_contiguous() -> None:
    ids = torch.arange(6000).view(600, 10) % 7
    for name, a in ops.count_numbered(ids[:, ::3], 7)._asdict().items():
        assert torch.equal(a, getattr(ops.count_numbered(ids[:, ::3].contiguous(), 7), name)), name


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
    columns, mine = ops.count_columns(ids, experts, num_shared)
    wanted, theirs = reference.count_columns(ids, experts, num_shared)
    assert columns.dtype == dtype and torch.equal(columns, wanted)
    apart = ops.count_numbered(columns, experts + num_shared)
    for name in mine._fields:
        a, b = getattr(mine, name), getattr(theirs, name)
        assert a.dtype == torch.int32 and torch.equal(a, b) and torch.equal(a, getattr(apart, name)), name


def test_columns_input_need_not_be_contiguous() -> None:
    ids = torch.arange(6000).view(600, 10) % 7
    columns, numbered = ops.count_columns(ids[:, ::3], 7, 2)
    again, of_dense = ops.count_columns(ids[:, ::3].contiguous(), 7, 2)
    assert torch.equal(columns, again) and all(map(torch.equal, numbered, of_dense))


COLUMNS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "flat": ({"topk_ids": torch.tensor([0, 1])}, r"topk_ids must be \[T, K\], got \[2\]"),
    "a shared expert": ({"topk_ids": torch.tensor([[0, 4]])}, "topk_ids must be in -1..3, got 4"),
    "low": ({"topk_ids": torch.tensor([[0, -2]])}, "topk_ids must be in -1..3, got -2"),
    "dtype": ({"topk_ids": torch.ones(2, 2)}, "topk_ids must be int32 or int64, got float32"),
    "none routed": ({"num_routed": 0}, "num_routed must be at least 1, got 0"),
    "none shared": ({"num_shared": 0}, r"num_shared must be in 1..1024, got 0"),
    "many shared": ({"num_shared": 1025}, r"num_shared must be in 1..1024, got 1025"),
    "many copies": (
        {"topk_ids": torch.zeros(1, 1, dtype=torch.int64).expand(2**21, 1), "num_shared": 1024},
        r"topk_ids must have fewer than 2\^31 entries with num_shared=1024 more columns, got 2149580800",
    ),
}


@pytest.mark.parametrize("name", COLUMNS_REFUSED)
def test_columns_refuses(name: str) -> None:
    changed, message = COLUMNS_REFUSED[name]
    given = {"topk_ids": torch.tensor([[0, 3], [-1, 1]]), "num_routed": 4, "num_shared": 1, **changed}
    with pytest.raises(ValueError, match=message):
        ops.count_columns(**given)


REFUSED: dict[str, tuple[Any, int, str]] = {
    "dtype": (torch.ones(2, 2), 4, "topk_ids must be int32 or int64, got float32"),
    "another dtype": (
        torch.ones(2, 2, dtype=torch.int16),
        4,
        "topk_ids must be int32 or int64, got another dtype",
    ),
    "no experts": (torch.ones(2, 2, dtype=torch.int64), 0, "num_experts must be at least 1, got 0"),
    "high": (torch.tensor([[0, 4]]), 4, "topk_ids must be in -1..3, got 4"),
    "low": (torch.tensor([[0, -2]]), 4, "topk_ids must be in -1..3, got -2"),
    "high int32": (torch.tensor([[0, 4]], dtype=torch.int32), 4, "topk_ids must be in -1..3, got 4"),
    "of 64 bits": (torch.tensor([[2**32 + 1]]), 4, "topk_ids must be in -1..3, got 4294967297"),
}


@pytest.mark.parametrize("op", [ops.count, ops.count_numbered])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, op: Callable[[Tensor, int], object]) -> None:
    ids, experts, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        op(ids, experts)


def test_numbered_refuses_a_flat_row() -> None:
    with pytest.raises(ValueError, match=r"topk_ids must be \[T, K\], got \[3\]"):
        ops.count_numbered(torch.tensor([0, 1, 2]), 4)


def test_opcheck() -> None:
    op = torch.ops.isoload.count.default
    torch.library.opcheck(op, (torch.tensor([[0, 2], [-1, 1]]), 3))
    torch.library.opcheck(op, (torch.zeros(0, 4, dtype=torch.int32), 3))
    numbered = torch.ops.isoload.count_numbered.default
    torch.library.opcheck(numbered, (torch.tensor([[0, 2], [-1, 1]]), 3))
    torch.library.opcheck(numbered, (torch.zeros(300, 4, dtype=torch.int32), 3))
    columns = torch.ops.isoload.count_columns.default
    torch.library.opcheck(columns, (torch.tensor([[0, 2], [-1, -1]]), 3, 2))
    torch.library.opcheck(columns, (torch.zeros(300, 4, dtype=torch.int32), 3, 1))
