"""number_rows: once to every rank of a token, numbered by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from isoload import ops


def draw(tokens: int, top_k: int, slots: int, seed: int = 0) -> Tensor:
    """With absent copies, and slots beyond the last."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, slots + 1, (tokens, top_k), generator=generator)


def test_worked_example() -> None:
    """Two slots per rank on three ranks: the first token visits ranks 2 and 0, the second none."""
    rows = ops.number_rows(torch.tensor([[4, 0, 1], [-1, 6, 9], [5, 4, 3]]), 2, 3)
    assert rows.ranks.tolist() == [[0, 2, 3], [3, 3, 3], [1, 2, 3]]
    assert rows.numbers.tolist() == [[0, 0, -1], [-1, -1, -1], [0, 1, -1]]
    assert rows.counts.tolist() == [[1, 1, 2], [2, 1, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 4), (1, 1), (5, 0), (63, 6), (300, 8)])
def test_equals_reference(tokens: int, top_k: int, dtype: torch.dtype) -> None:
    for ranks, size in ((1, 5), (3, 2), (16, 17), (70, 1), (300, 2)):
        slots = draw(tokens, top_k, ranks * size).to(dtype)
        mine, theirs = ops.number_rows(slots, size, ranks), reference.number_rows(slots, size, ranks)
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), (ranks, size)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_by_sorting(seed: int) -> None:
    """Every (rank, token) once, in order: torch.unique of the pairs."""
    ranks, size, tokens = 9, 4, 120
    slots = draw(tokens, 6, ranks * size, seed)
    rows = ops.number_rows(slots, size, ranks)
    present = (slots >= 0) & (slots < ranks * size)
    token = torch.arange(tokens).unsqueeze(1).expand_as(slots)
    pairs = torch.stack([slots // size, token], 2)[present].unique(dim=0)
    there = rows.ranks < ranks
    token = torch.arange(tokens).unsqueeze(1).expand_as(rows.ranks)
    found = torch.stack([rows.ranks.long(), rows.numbers.long(), token], 2)[there]
    found = found[(found[:, 0] * tokens + found[:, 1]).argsort()]
    assert torch.equal(found[:, [0, 2]], pairs)
    assert torch.equal(rows.counts[0], torch.bincount(pairs[:, 0], minlength=ranks))
    assert torch.equal(rows.counts[1], torch.bincount((slots // size)[present], minlength=ranks))


def test_slots_beyond_int32_are_absent() -> None:
    rows = ops.number_rows(torch.tensor([[2**32, 2**32 + 1, 1, -(2**32)]]), 1, 2)
    assert rows.ranks.tolist() == [[1, 2]] and rows.counts.tolist() == [[0, 1], [0, 1]]
