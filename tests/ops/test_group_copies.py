"""group_copies: a stable sort by slot, equal to torch's, whatever the shape; what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from isoload import ops

SHAPES = [(0, 4), (1, 1), (5, 0), (63, 6), (200, 8)]


def draw(rows: int, top_k: int, num_slots: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, max(num_slots, 1), (rows, top_k), generator=generator)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "top_k"), SHAPES)
def test_equals_reference(rows: int, top_k: int, dtype: torch.dtype) -> None:
    for first, num_slots, beside in ((0, 5, 5), (2, 3, 9), (0, 0, 4), (0, 300, 300)):
        slots = draw(rows, top_k, beside).to(dtype)
        present = int(((slots >= first) & (slots < first + num_slots)).sum())
        for places in (None, present):
            mine = ops.group_copies(slots, first, num_slots, places)
            theirs = reference.group_copies(slots, first, num_slots, places)
            for one, other in zip(mine, theirs, strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("seed", range(3))
def test_is_a_stable_sort(seed: int) -> None:
    """By torch's own."""
    slots = draw(90, 7, 12, seed)
    key, order = torch.where(slots < 0, 99, slots).flatten().sort(stable=True)
    grouping = ops.group_copies(slots, 0, 12)
    present = int((key < 99).sum())
    assert torch.equal(grouping.copy[:present], order[:present])
    assert torch.equal(grouping.slot[:present], key[:present])
    assert torch.equal(grouping.ends.long(), torch.bincount(key, minlength=100)[:12].cumsum(0))
    places = grouping.position[slots >= 0]
    assert torch.equal(grouping.copy[places], (slots.flatten() >= 0).nonzero().flatten())
    assert (grouping.position[slots < 0] == slots.numel()).all()


def test_slots_beyond_int32_are_absent() -> None:
    slots = torch.tensor([[2**32, 2**32 + 1, 1, -(2**32)]])
    assert ops.group_copies(slots, 0, 2).position.tolist() == [[4, 4, 0, 4]]
