"""Copies in slot order: the permutation before and after the grouped GEMMs, without a host sync.

Shapes: N received rows of width H, K copies per row at most, S slots of one group, C sorted copies. Buffers in
slot order hold the present copies first; what lies behind them, the tail, is never read back, so it may hold
anything. Both directions gather, so that sums have one fixed order on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    parts: Sequence[tuple[Tensor, Grouping]], weights: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """[N, H] the sum over k of ``weights[n, k] * copies[position[n, k]]``, ascending k, in max(fp32, dtype).

    Args:
        parts: three at most: copies [C, H] in slot order, and their grouping. A copy is in one of them.
        weights: [N, K] gate weights; those of absent copies are not used and get gradient 0.
        dtype: that the sum is rounded to; None: not at all.
    """
    exact = sum_dtype(parts[0][0].dtype)
    of = [tensor for copies, grouping in parts for tensor in (copies, grouping.copy, grouping.position)]
    result: Tensor = _WeightedSum.apply(dtype or exact, weights, *of)
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
    def forward(ctx: Any, dtype: torch.dtype, weights: Tensor, *of: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *of)
        copies, position = of[::3], of[2::3]
        more = list(zip(copies[1:], position[1:], strict=True))
        return sum_rows(copies[0], position[0], weights, dtype, more)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *of = ctx.saved_tensors
        gradients: list[Tensor | None] = []
        to_weights = None
        for copies, copy, position in zip(of[::3], of[1::3], of[2::3], strict=True):
            to_copies, to_these = sum_rows_backward(grad, copies, weights, position, copy)
            to_weights = to_these if to_weights is None else to_weights + to_these  # 0 for another part's
            gradients += [to_copies, None, None]
        return None, to_weights, *gradients
