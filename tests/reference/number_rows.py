"""number_rows: the ranks of every token, and its row's number among those to each."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.results import RowNumbers


def number_rows(slots: Tensor, slots_per_rank: int, num_ranks: int) -> RowNumbers:
    """Ranks [T, D] ascending, then R; numbers [T, D], then -1; counts [2, R] rows and copies to every rank."""
    width = min(slots.shape[1], num_ranks)
    rows, copies = [0] * num_ranks, [0] * num_ranks
    ranks, numbers = [], []
    for token in slots.tolist():
        of_copies = [p // slots_per_rank for p in token if 0 <= p < slots_per_rank * num_ranks]
        for rank in of_copies:
            copies[rank] += 1
        own = sorted(set(of_copies))
        ranks.append(own + [num_ranks] * (width - len(own)))
        numbers.append([rows[rank] for rank in own] + [-1] * (width - len(own)))
        for rank in own:
            rows[rank] += 1
    assert all(row <= copy for row, copy in zip(rows, copies, strict=True)), "a row carries a copy at least"
    shape = (len(slots), width)
    return RowNumbers(
        torch.tensor(ranks, dtype=torch.int32).view(shape),
        torch.tensor(numbers, dtype=torch.int32).view(shape),
        torch.tensor([rows, copies], dtype=torch.int64),
    )
