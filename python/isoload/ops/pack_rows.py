"""pack_rows: the rows that a rank sends, each with the slots and weights of its copies; wrapper and fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.ops.library import call, longs, op
from isoload.ops.results import PackedRows, RowLayout, RowNumbers


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    payload = a.slots.new_empty((a.num_rows, a.bytes), dtype=torch.uint8)
    return payload, longs(a.slots, a.num_rows), longs(a.slots, a.num_rows), longs(a.slots, *a.ranks.shape)


_pack_rows = op("pack_rows", _fake)


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
