"""Linear maps of sorted copies by their slots' weights: one grouped GEMM, or a loop where there is none.

Shapes: C sorted copies, S slots; see isoload.ops.counting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload import kernels
from isoload.ops.results import Grouping
from isoload.weights.experts import ROW_BYTES, BorrowedWeights, ExpertWeights, compute_path
from isoload.weights.quantised import quantised_linear

Linear = Callable[[Tensor, Tensor, Tensor | None, Grouping], Tensor]
Projection = Callable[[Tensor, Grouping], Tensor]  # x [C, in] -> [C, out]


def projections(group: ExpertWeights, dtype: torch.dtype) -> tuple[Projection, Projection]:
    """gate_up's and down's products with copies of a dtype, once the weights are there."""
    kernel = compute_path(group, dtype)
    linear = _LINEAR[kernel]
    if isinstance(group, BorrowedWeights):
        group.wait()
        linear = partial(_BorrowedLinear.apply, kernel, group.wait)

    def projection(name: str) -> Projection:
        weight, bias, *scales = (getattr(group, name + part) for part in ("", "_bias", "_scale", "_scale_2"))
        if group.quantised:
            stacks = [weight, *(scale for scale in scales if scale is not None)]
            return lambda x, grouping: quantised_linear(x, stacks, bias, grouping, kernel == "grouped_mm")
        return lambda x, grouping: linear(x, weight, bias, grouping)

    return projection("gate_up"), projection("down")


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grouping: Grouping) -> Tensor:
    """[C, in] -> [C, out] by the slot of each copy; the tail is undefined, in both directions."""
    # grouped_mm requires contiguous incoming gradients: weighted_sum and both activations make them so.
    y = grouped_mm(x, weight.transpose(1, 2), grouping.ends)
    if bias is None:
        return y
    biased: Tensor = _AddBias.apply(y, bias, grouping.slot, grouping.ends)
    return biased


def _loop_linear(x: Tensor, weight: Tensor, bias: Tensor | None, grouping: Grouping) -> Tensor:
    bounds = [0, *grouping.ends.tolist()]
    biases = [None] * len(weight) if bias is None else bias.unbind()
    parts = [
        F.linear(x[start:end], matrix, row)
        for start, end, matrix, row in zip(bounds, bounds[1:], weight.unbind(), biases, strict=False)
    ]
    return torch.cat([*parts, x.new_zeros(len(x) - bounds[-1], weight.shape[1])])


_LINEAR: dict[str, Linear] = {"grouped_mm": _grouped_linear, "loop": _loop_linear}


class _BorrowedLinear(torch.autograd.Function):
    """A linear map that does not save its weight: backward reads the memory where it was, see BorrowedWeights.

    The weight may have another dtype than the copies, in whose dtype the products are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: str,
        wait: Callable[[], None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grouping: Grouping,
    ) -> Tensor:
        ctx.save_for_backward(x, grouping.ends)
        ctx.kernel, ctx.wait, ctx.weight = kernel, wait, weight.detach()
        return _LINEAR[kernel](x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), grouping)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        _, _, _, trains, biased, _ = ctx.needs_input_grad
        ctx.wait()
        own, weight = ctx.weight.dtype, ctx.weight.to(grad.dtype)
        if ctx.kernel == "grouped_mm":
            to_x = grouped_mm(grad, weight, ends)
            to_weight = grouped_mm(grad.t(), x, ends).to(own) if trains else None
            return None, None, to_x, to_weight, _sum_per_slot(grad, ends).to(own) if biased else None, None
        bounds = [0, *ends.tolist()]
        parts = [(grad[a:b], x[a:b]) for a, b in pairwise(bounds)]
        to_x = torch.cat([g @ w for (g, _), w in zip(parts, weight.unbind(), strict=True)])
        to_x = torch.cat([to_x, x.new_zeros(len(x) - bounds[-1], x.shape[1])])
        to_weight = torch.stack([g.t() @ rows for g, rows in parts]).to(own) if trains else None
        to_bias = torch.stack([g.sum(0) for g, _ in parts]).to(own) if biased else None
        return None, None, to_x, to_weight, to_bias, None


class _AddBias(torch.autograd.Function):
    """``y + bias[slot]``, where the kernel fits in y's own memory, which nothing else may hold; its own backward,
    because indexing would add the tail's gradients, in y's dtype."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, slot: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        if y.dtype == bias.dtype and kernels.fit(y, bias):
            from isoload.kernels import activation as kernel  # imports Triton

            kernel.add_bias(y, bias, slot, ends)
            ctx.mark_dirty(y)
            return y
        return y + bias.index_select(0, slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        return grad, _sum_per_slot(grad, ends) if ctx.needs_input_grad[1] else None, None, None


def _sum_per_slot(grad: Tensor, ends: Tensor) -> Tensor:
    """[S, F] each slot's rows of grad [C, F] added up: a grouped product with ones, fp32 inside, in a fixed order."""
    ones = grad.new_ones(len(grad), ROW_BYTES // grad.element_size())
    return grouped_mm(ones.t(), grad, ends)[:, 0]


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a [C, in] by b [S, in, out] to [C, out], or a [in, C] by b [C, out] to [S, in, out]: groups end at ends [S]."""
    return F.grouped_mm(a, b, offs=ends)
