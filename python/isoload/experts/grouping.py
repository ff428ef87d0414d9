"""Copies in slot order: the permutation before and after the grouped GEMMs, without a host sync.

Shapes: N received rows of width H, K copies per row at most, S slots of one group, C sorted copies. Buffers in
slot order hold the present copies first; what lies behind them, the tail, is never read back, so it may hold
anything. Both directions gather, so that sums have one fixed order on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.permutation import spread_rows, sum_dtype, sum_rows, sum_rows_backward
from isoload.results import Grouping


def gather_copies(rows: Tensor, grouping: Grouping) -> Tensor:
    """[C, H] the row of every sorted copy, from rows [N, H]; gradients add up in max(fp32, dtype)."""
    result: Tensor = _GatherCopies.apply(rows, grouping.copy, grouping.position)
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
    def forward(ctx: Any, rows: Tensor, copy: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return spread_rows(rows, position, copy, per_row=max(position.shape[1], 1))

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
