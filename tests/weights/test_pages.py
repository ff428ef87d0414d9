"""Pages of weights: which have memory, what is given back, and the slots of a rank that may have memory."""

from __future__ import annotations

import mmap
import re

import numpy as np
import pytest
import torch

from isoload.weights.pages import PagedTensor, PageLayout, PagePool, resident_slots
from support.pagemap import resident_by_layer, resident_bytes

torch.set_num_threads(1)
DRAWN = 200_000


def test_a_row_with_memory_has_memory_for_all_of_its_bytes() -> None:
    """For 200,000 drawn tensors: the pages of the first rows cover them, and one page less would not."""
    draw = np.random.default_rng(0)
    page = draw.choice([4096, 16384, 65536, 2 << 20], DRAWN)
    row = draw.integers(1, 40, DRAWN) * draw.choice([1, 2, 511, 512, 4096, 1 << 20, (2 << 20) // 3], DRAWN)
    num = draw.integers(1, 21, DRAWN)
    rows = draw.integers(0, num + 1)
    pages, whole = np.empty(DRAWN, np.int64), np.empty(DRAWN, np.int64)
    for i, (a, b, c, d) in enumerate(
        zip(row.tolist(), num.tolist(), page.tolist(), rows.tolist(), strict=True)
    ):
        layout = PageLayout(a, b, c)
        pages[i], whole[i] = layout.pages_of(d), layout.num_pages
    assert (pages * page >= row * rows).all()
    assert ((pages - 1) * page < row * rows).all()
    assert (pages <= whole).all() and (pages[rows == num] == whole[rows == num]).all()
    assert ((rows == 0) == (pages == 0)).all()


@pytest.mark.parametrize("width", [1, 700, mmap.PAGESIZE // 4, 3 * mmap.PAGESIZE // 4 + 5])
def test_resident_bytes_are_those_of_the_rows_with_memory(width: int) -> None:
    values = torch.rand(6, width) + 1
    paged = PagedTensor(values, 4)
    layout = paged.layout
    for rows in (4, 2, 5, 6, 0, 1):
        before = paged.tensor.clone() if rows < paged.rows else None
        paged.resize(rows)
        if before is None:
            paged.tensor[:rows] = values[:rows]
        assert torch.equal(paged.tensor[:rows], values[:rows]), rows
        assert resident_bytes(paged) == layout.pages_of(rows) * mmap.PAGESIZE, rows
    first = layout.pages_of(1) * mmap.PAGESIZE
    assert not paged.tensor.view(-1).view(torch.uint8)[first:].any(), "absent rows read as zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32])
def test_a_paged_copy_has_the_bytes_and_the_shape(dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (3, 5, 7)).to(dtype)
    paged = PagedTensor(values, 3).tensor
    assert paged.shape == values.shape and paged.dtype == dtype
    assert torch.equal(paged.view(torch.uint8), values.view(torch.uint8))


def test_a_rank_never_has_more_slots_than_at_the_start() -> None:
    pool, values = PagePool(), torch.rand(3, mmap.PAGESIZE)
    for layer, rows in ((3, 3), (5, 1)):
        pool.add(layer, [values, values[:, : mmap.PAGESIZE // 2]], rows)
    assert pool.limit == 4 and pool.slots == {3: 3, 5: 1}
    with pytest.raises(ValueError, match=re.escape("slots with memory must be at most 4 over all layers")):
        pool.resize({5: 2})
    assert pool.slots == {3: 3, 5: 1}
    pool.resize({5: 2, 3: 2})
    for tensors in pool.layers.values():
        for tensor in tensors:
            tensor.tensor[:2] = 1.0
    size = values[0].nbytes * 3 // 2
    assert pool.slots == {3: 2, 5: 2} and pool.slot_bytes() == {3: size, 5: size}
    assert resident_by_layer(pool) == {3: 2 * size, 5: 2 * size}


def test_pages_are_given_before_they_are_taken() -> None:
    pool, calls = PagePool(), []
    for layer in (0, 1):
        pool.add(layer, [torch.rand(2, 8)], 1 + layer)
        tensor = pool.layers[layer][0]
        tensor.resize = lambda rows, layer=layer: calls.append((layer, rows))  # type: ignore[method-assign]
    pool.resize({0: 2, 1: 1})
    assert calls == [(1, 1), (0, 2)]


def test_what_cannot_be_paged_is_refused() -> None:
    with pytest.raises(
        ValueError, match="weights must be on the CPU to be paged, got meta: pages on CUDA are not"
    ):
        PagedTensor(torch.empty(2, 3, device="meta"), 1)
    with pytest.raises(
        ValueError, match=re.escape("weights must have rows of at least one byte, got shape [2, 0]")
    ):
        PagedTensor(torch.empty(2, 0), 1)
    with pytest.raises(ValueError, match=r"rows must be in 0\.\.2, got 3"):
        PagedTensor(torch.empty(2, 3), 3)


def test_absent_slots_come_last_on_their_rank() -> None:
    table = torch.tensor([[0, 1, 2, -1], [0, -1, 1, 2]])
    assert resident_slots(table, 2).tolist() == [[2, 1], [1, 2]]
    with pytest.raises(
        ValueError, match="absent slots must be the last of their rank, not so in layer 1, rank 1"
    ):
        resident_slots(torch.tensor([[0, 1, 2, -1], [0, 1, -1, 2]]), 2)
