"""pack_rows: the rows that a rank sends, each with the slots and weights of its copies; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.results import PackedRows, RowLayout, RowNumbers

_pack_rows = library.pack_rows.default


def pack_rows(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    rows: RowNumbers,
    slots_per_rank: int,
    num_rows: int,
    capacity: int | None = None,
) -> PackedRows:
    """The rows by destination, then token; padding rows have slots -1, weights and values 0.

    Args:
        x: [T, H] of any dtype.
        slots: [T, K] int32 or int64, as :func:`number_rows` got them.
        weights: [T, K] float32 or float64.
        rows: what :func:`number_rows` returned.
        slots_per_rank: S.
        num_rows: n, the rows to all ranks; with a capacity R times that.
        capacity: C; those to destination d start at d * C. None: one destination behind the other.
    """
    layout = RowLayout.of(x, weights)
    size = 0 if capacity is None else capacity
    return PackedRows(*call(_pack_rows, x, slots, weights, *rows, slots_per_rank, num_rows, size, *layout))


@torch.library.register_fake("isoload::pack_rows")
def _(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    ranks: Tensor,
    numbers: Tensor,
    counts: Tensor,
    slots_per_rank: int,
    num_rows: int,
    capacity: int,
    slots_at: int,
    weights_at: int,
    bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    payload = slots.new_empty((num_rows, bytes), dtype=torch.uint8)
    row_to_token, row_to_rank = (slots.new_empty((num_rows,), dtype=torch.int64) for _ in range(2))
    return payload, row_to_token, row_to_rank, ranks.new_empty(ranks.shape, dtype=torch.int64)
