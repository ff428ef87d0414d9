"""number_rows: which ranks a token goes to, and the number of its row among those to each; wrapper and fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.ops.library import call, ints, longs, op
from isoload.ops.results import RowNumbers


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (a.slots.shape[0], min(a.slots.shape[1], a.num_ranks))
    return ints(a.slots, *shape), ints(a.slots, *shape), longs(a.slots, 2, a.num_ranks)


_number_rows = op("number_rows", _fake)


def number_rows(slots: Tensor, slots_per_rank: int, num_ranks: int) -> RowNumbers:
    """A token goes once to every rank that holds a slot of its; rows to a rank are numbered by token.

    Args:
        slots: [T, K] int32 or int64; any outside 0..R*S-1 is an absent copy.
        slots_per_rank: S; slot p lives on rank p // S.
        num_ranks: R.
    """
    return RowNumbers(*call(_number_rows, slots, slots_per_rank, num_ranks))
