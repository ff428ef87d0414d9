"""number_rows: which ranks a token goes to, and the number of its row among those to each; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.results import RowNumbers

_number_rows = library.number_rows.default


def number_rows(slots: Tensor, slots_per_rank: int, num_ranks: int) -> RowNumbers:
    """A token goes once to every rank that holds a slot of its; rows to a rank are numbered by token.

    Args:
        slots: [T, K] int32 or int64; any outside 0..R*S-1 is an absent copy.
        slots_per_rank: S; slot p lives on rank p // S.
        num_ranks: R.
    """
    return RowNumbers(*call(_number_rows, slots, slots_per_rank, num_ranks))


@torch.library.register_fake("isoload::number_rows")
def _(slots: Tensor, slots_per_rank: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (slots.shape[0], min(slots.shape[1], num_ranks))
    ranks, numbers = (slots.new_empty(shape, dtype=torch.int32) for _ in range(2))
    return ranks, numbers, slots.new_empty((2, num_ranks), dtype=torch.int64)
