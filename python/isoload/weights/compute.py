"""The experts of one rank: grouped GEMMs over the received copies. Shapes: N received rows of width H, at most K copies
per row, S slots, I intermediate width, C sorted copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload import kernels
from isoload.checks import put_on, values_readable
from isoload.ops import group_copies
from isoload.ops.counting import gather_copies, sum_dtype, weighted_sum
from isoload.ops.results import Grouping
from isoload.weights.experts import (
    DTYPES,
    ROW_BYTES,
    Activation,
    BorrowedWeights,
    ClampedGLU,
    ExpertWeights,
    SwiGLU,
    compute_path,
)
from isoload.weights.quantised import check_no_gradients, quantised_linear

Linear = Callable[[Tensor, Tensor, Tensor | None, Grouping], Tensor]
Projection = Callable[[Tensor, Grouping], Tensor]  # x [C, in] -> [C, out]


def projections(group: ExpertWeights, dtype: torch.dtype) -> tuple[Projection, Projection]:
    """Return gate_up's and down's products with copies of a dtype, after waiting for the weights."""
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
    """Map [C, in] -> [C, out] by the slot of each copy; rows after the last copy are undefined, in both directions."""
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
    """A linear map, in the copies' dtype, that does not save its weight: backward reads the memory where it was."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: str,
        wait: Callable[[], bool],
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
        to_x = None if ctx.wait() else torch.full_like(x, torch.nan)  # replaced, see Borrowed.wait
        dtype, weight = ctx.weight.dtype, ctx.weight.to(grad.dtype)
        if ctx.kernel == "grouped_mm":
            to_x = grouped_mm(grad, weight, ends) if to_x is None else to_x
            to_weight = grouped_mm(grad.t(), x, ends).to(dtype) if trains else None
            return None, None, to_x, to_weight, _sum_per_slot(grad, ends).to(dtype) if biased else None, None
        bounds = [0, *ends.tolist()]
        parts = [(grad[a:b], x[a:b]) for a, b in pairwise(bounds)]
        if to_x is None:
            to_rows = [g @ w for (g, _), w in zip(parts, weight.unbind(), strict=True)]
            to_x = torch.cat([*to_rows, x.new_zeros(len(x) - bounds[-1], x.shape[1])])
        to_weight = torch.stack([g.t() @ rows for g, rows in parts]).to(dtype) if trains else None
        to_bias = torch.stack([g.sum(0) for g, _ in parts]).to(dtype) if biased else None
        return None, None, to_x, to_weight, to_bias, None


class _AddBias(torch.autograd.Function):
    """Return ``y + bias[slot]``, perhaps in y's own memory, so nothing else may use y. Its own backward leaves out rows
    after the last copy, and adds in float32.
    """

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
    """Return [S, F], each slot's rows of grad [C, F] added by a grouped product with ones, in a fixed order."""
    ones = grad.new_ones(len(grad), ROW_BYTES // grad.element_size())
    return grouped_mm(ones.t(), grad, ends)[:, 0]


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiply a [C, in] by b [S, in, out] to [C, out], or a [in, C] by b [C, out] to [S, in, out]."""
    return F.grouped_mm(a, b, offs=ends)


def run_experts(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor,
    groups: Sequence[ExpertWeights],
    activation: Activation,
    max_copies: Sequence[int] | None = None,
) -> Tensor:
    """Return [N, H] for each row the sum over its local copies of ``weight * expert(row)``, added in max(fp32, dtype).

    Args:
        rows: [N, H] in the first group's dtype; with quantised groups in any dtype, without gradients.
        slots: [N, K] int32 or int64 local slot, numbered through all groups; -1 = absent.
        weights: [N, K] float32 gate weights (float64 ones only with float64 rows).
        groups: stacks of weights: the resident rows, then the spare pool.
        activation: between the two projections. Autocast has no effect inside.
        max_copies: most present copies per group, which sizes the buffers; None = N*K. More copies raise ValueError
            where values are readable; elsewhere they are dropped and set the device's error word.
    """
    _check_arguments(rows, slots, weights, groups, max_copies)
    # Autocast would cast the operands of the loop, but not those of grouped_mm.
    if torch.is_autocast_enabled(rows.device.type):
        with torch.autocast(rows.device.type, enabled=False):
            return run_experts(rows, slots, weights, groups, activation, max_copies)
    parts = []
    first = 0
    for g, group in enumerate(groups):
        num_slots = group.num_slots
        # At least one place, so that no product has zero rows.
        places = None if max_copies is None else min(max(max_copies[g], 1), slots.numel())
        grouping = group_copies(slots, first, num_slots, places)
        copies = gather_copies(rows, grouping)  # [C, H]
        if num_slots:  # otherwise all copies are absent, but gradients of rows stay connected
            to_inner, to_hidden = projections(group, rows.dtype)
            inner = activate(activation, to_inner(copies, grouping), grouping)  # [C, 2I] -> [C, I]
            copies = to_hidden(inner, grouping)  # [C, H]
        parts.append((copies, grouping))
        first += num_slots
    return weighted_sum(parts, weights, rows.dtype)  # [N, H]


def run_sorted(
    rows: Tensor,
    weights: Tensor,
    ends: Sequence[int],
    groups: Sequence[ExpertWeights],
    activation: Activation,
) -> Tensor:
    """Return [N, H] ``weight * expert(row)`` for rows of one copy each, sorted by slot: nothing is added up. Slot s's
    rows end before ends[s], numbered through the groups; further ends have no rows. weights: [N, 1] float32.
    """
    slots = sum(group.num_slots for group in groups)
    bounds = [0, *ends[:slots]]
    if len(ends) < slots or bounds != sorted(bounds) or bounds[-1] != len(rows):
        raise ValueError(f"ends must ascend to the {len(rows)} rows over {slots} slots, got {list(ends)}")
    if weights.shape != (len(rows), 1) or weights.dtype not in (torch.float32, sum_dtype(rows.dtype)):
        raise ValueError(
            f"weights must be {[len(rows), 1]} torch.float32, got {list(weights.shape)} {weights.dtype}"
        )
    if groups[0].quantised:
        check_no_gradients()
    parts, first = [], 0
    with torch.autocast(rows.device.type, enabled=False):
        for group in groups:
            start, end = bounds[first], bounds[first + group.num_slots]
            if end > start:
                counts = [b - a for a, b in pairwise(bounds[first : first + group.num_slots + 1])]
                copy = torch.arange(end - start, device=rows.device)
                slot = torch.arange(len(counts), device=rows.device)
                slot = slot.repeat_interleave(put_on(rows.device, counts), output_size=len(copy))
                last = put_on(rows.device, list(accumulate(counts))).to(torch.int32)
                grouping = Grouping(copy, slot, last, copy.unsqueeze(1))
                to_inner, to_hidden = projections(group, rows.dtype)
                inner = activate(activation, to_inner(rows[start:end], grouping), grouping)
                parts.append((to_hidden(inner, grouping) * weights[start:end]).to(rows.dtype))
            first += group.num_slots
        return torch.cat(parts) if parts else rows * weights.to(rows.dtype)


def count_copies(slots: Tensor, groups: Sequence[ExpertWeights]) -> list[int]:
    counts, first = [], 0
    for group in groups:
        end = first + group.num_slots
        counts.append(int(((slots >= first) & (slots < end)).sum()))
        first = end
    return counts


def activate(activation: Activation, gate_up: Tensor, grouping: Grouping) -> Tensor:
    """Map [C, 2I] -> [C, I]; if the kernels apply, without touching rows after the last copy."""
    known = isinstance(activation, SwiGLU | ClampedGLU)
    if not known or not kernels.fit(gate_up.detach()):  # autograd records the Function below
        return activation(gate_up)
    clamp = None if isinstance(activation, SwiGLU) else (activation.alpha, activation.limit)
    inner: Tensor = _Activate.apply(gate_up, grouping.ends, clamp)
    return inner


class _Activate(torch.autograd.Function):
    """The Triton kernels; the plain version is the activation itself, with torch's own backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, ends: Tensor, clamp: tuple[float, float] | None) -> Tensor:
        from isoload.kernels.activation import activate  # imports Triton

        ctx.save_for_backward(gate_up, ends)
        ctx.clamp = clamp
        inner: Tensor = activate(gate_up, ends, clamp)
        return inner

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from isoload.kernels.activation import activate_backward  # imports Triton

        gate_up, ends = ctx.saved_tensors
        to_gate_up: Tensor = activate_backward(grad, gate_up, ends, ctx.clamp)
        return to_gate_up, None, None


def _check_arguments(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor,
    groups: Sequence[ExpertWeights],
    max_copies: Sequence[int] | None,
) -> None:
    if not groups:
        raise ValueError("groups must hold at least one stack of weights, got none")
    hidden, dtype = groups[0].down.shape[1], groups[0].down.dtype
    for g, group in enumerate(groups):
        # Borrowed weights are cast where they are used.
        same = isinstance(group, BorrowedWeights) or group.down.dtype == dtype
        if group.down.shape[1] != hidden or not same:
            raise ValueError(
                f"groups[{g}] must have the width and dtype of groups[0] ({hidden}, {dtype}), "
                f"got {group.down.shape[1]}, {group.down.dtype}"
            )
    dtypes: Sequence[torch.dtype] = (dtype,)
    if groups[0].quantised:
        check_no_gradients()
        dtypes = DTYPES
    if rows.dim() != 2 or rows.shape[1] != hidden or rows.dtype not in dtypes:
        names = " or ".join(map(str, dtypes))
        raise ValueError(f"rows must be [N, {hidden}] {names}, got {list(rows.shape)} {rows.dtype}")
    if slots.dim() != 2 or len(slots) != len(rows) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"slots must be [{len(rows)}, K] int32 or int64, got {list(slots.shape)} {slots.dtype}"
        )
    if weights.shape != slots.shape or weights.dtype not in (torch.float32, sum_dtype(rows.dtype)):
        raise ValueError(
            f"weights must be {list(slots.shape)} torch.float32 (torch.float64 only with float64 rows), "
            f"got {list(weights.shape)} {weights.dtype}"
        )
    for name, tensor in (("rows", rows), ("slots", slots), ("weights", weights)):
        if tensor.device != groups[0].down.device:
            raise ValueError(f"{name} must be on {groups[0].down.device}, got {tensor.device}")
    if max_copies is not None and len(max_copies) != len(groups):
        raise ValueError(f"max_copies must have one entry per group ({len(groups)}), got {len(max_copies)}")
    if values_readable(slots):
        num_slots = sum(group.num_slots for group in groups)
        if len(outside := slots[(slots < -1) | (slots >= num_slots)]):
            raise ValueError(f"slots must be in -1..{num_slots - 1}, got {int(outside[0])}")
        present = [] if max_copies is None else count_copies(slots, groups)
        for g, (limit, count) in enumerate(zip(max_copies or (), present, strict=True)):
            if limit < count:
                raise ValueError(
                    f"max_copies[{g}] must be at least the number of copies present ({count}), got {limit}"
                )
