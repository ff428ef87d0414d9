"""Copies in slot order: the permutation before and after the grouped GEMMs, without a host sync.

Shapes: N received rows of width H, K copies per row at most, S slots of one group, C sorted copies. Buffers in
slot order hold the present copies first; what lies behind them, the tail, is never read back, so it may hold
anything. Both directions gather, so that sums have one fixed order on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoload.permutation import spread_rows, sum_dtype, sum_rows, sum_rows_backward
from isoload.value_checks import values_readable


@dataclass(frozen=True)
class Grouping:
    """Where the copies of one group of slots lie once they are sorted by slot (stable: then by row, then by k).

    Fields:
        copy      [C] int64  the copy ``n * K + k`` at each place
        slot      [C] int64  its slot within the group; S-1 in the tail
        ends      [S] int32  slot s's copies end before place ``ends[s]``: the offsets of a grouped GEMM
        position  [N, K] int64  the place of copy (n, k); C where it is absent from this group
    """

    copy: Tensor
    slot: Tensor
    ends: Tensor
    position: Tensor

    @property
    def row(self) -> Tensor:
        """[C] int64 the row that each copy is of."""
        return self.copy // max(self.position.shape[1], 1)


def group_copies(slots: Tensor, first: int, num_slots: int, num_copies: int | None = None) -> Grouping:
    """Sorts the copies of local slots ``first .. first + num_slots - 1``; others count as absent.

    Args:
        slots: [N, K] int64 local slots; -1 = absent.
        first: the group's first local slot.
        num_slots: S.
        num_copies: copies present, where the host has their number: buffers then hold no more. None: N*K.
    """
    local = slots - first
    present = (local >= 0) & (local < num_slots)
    key = torch.where(present, local, num_slots).flatten()
    # One place at least, so that no product has zero rows.
    held = len(key) if num_copies is None else min(max(num_copies, 1), len(key))
    if num_copies and values_readable(slots):
        copy = present.flatten().nonzero().flatten()  # only these need sorting
        key, order = key[copy].sort(stable=True)
        copy = copy[order]
    else:
        key, copy = key.sort(stable=True)
    bounds = torch.arange(num_slots, device=key.device)
    ends = torch.searchsorted(key, bounds, right=True, out_int32=True).clamp(max=held)
    position = torch.full_like(slots, held).flatten()
    position = position.scatter_(0, copy, torch.arange(len(copy), device=copy.device)).view(slots.shape)
    position = position.masked_fill(present.logical_not(), held).clamp(max=held)
    slot = key[:held].clamp(max=max(num_slots - 1, 0))
    return Grouping(copy[:held], slot, ends, position)


def gather_copies(rows: Tensor, grouping: Grouping) -> Tensor:
    """[C, H] the row of every sorted copy, from rows [N, H]; gradients add up in max(fp32, dtype)."""
    result: Tensor = _GatherCopies.apply(rows, grouping.row, grouping.position)
    return result


def weighted_sum(
    copies: Tensor, weights: Tensor, grouping: Grouping, dtype: torch.dtype | None = None
) -> Tensor:
    """[N, H] the sum over k of ``weights[n, k] * copies[position[n, k]]``, ascending k, in max(fp32, dtype).

    Args:
        copies: [C, H] in slot order.
        weights: [N, K] gate weights; those of absent copies are not used and get gradient 0.
        grouping: of the copies.
        dtype: that the sum is rounded to; None: not at all.
    """
    exact = sum_dtype(copies.dtype)
    result: Tensor = _WeightedSum.apply(copies, weights, grouping.copy, grouping.position, dtype or exact)
    return result


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, row: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return spread_rows(rows, position, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (position,) = ctx.saved_tensors
        return sum_rows(grad, position), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies: Tensor, weights: Tensor, copy: Tensor, position: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(copies, weights, copy, position)
        return sum_rows(copies, position, weights, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        copies, weights, copy, position = ctx.saved_tensors
        return *sum_rows_backward(grad, copies, weights, position, copy), None, None, None
