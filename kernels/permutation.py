"""The permutation between rows and their copies: spread, its adjoint sum, and the gradient of a weighted sum.

Shapes: N rows of width H, K copies per row at most, C places. position [N, K] int64 is the place of each copy, C or
more where there is none. Every place belongs to one copy at most, so no kernel needs atomics. The twins are in
isoload.ops.counting; sums give their bits, for products and sums are rounded one by one, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from isoload.kernels import MOST_PARTS, cover, tile

# What changes from batch to batch, and loads of single values: a kernel compiled for a multiple of 16, for 1, or for
# an aligned address would serve no other, and gain nothing.
SIZES = {
    "do_not_specialize": ["num_rows", "num_places", "num_places_1", "num_places_2"],
    "do_not_specialize_on_alignment": ["position", "position_1", "position_2", "weights", "to_weights"],
}


@triton.jit(**SIZES)
def _spread_kernel(
    rows, position, copies, num_rows, num_places, width, stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(rows + row[:, None] * stride + column[None, :], mask=inside)
    for k in tl.static_range(K):
        place = tl.load(position + row * K + k, mask=row < num_rows, other=num_places)
        there = (place < num_places)[:, None] & inside
        tl.store(copies + place[:, None] * width + column[None, :], values, mask=there)


@triton.jit
def _copy(copies, position, num_places, at, column, inside, width):
    """A tile of the copies at positions `at` in float32, 0 where there is none, and which rows have one."""
    place = tl.load(position + at, mask=at >= 0, other=num_places)
    there = (place < num_places)[:, None] & inside
    part = tl.load(copies + place[:, None] * width + column[None, :], mask=there, other=0)
    return part.to(tl.float32), place < num_places


@triton.jit(**SIZES)
def _sum_kernel(
    copies, position, copies_1, position_1, copies_2, position_2, weights, total,
    num_rows, num_places, num_places_1, num_places_2, width, weight_stride,
    K: tl.constexpr, PARTS: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    added = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(K):
        at = tl.where(row < num_rows, row * K + k, -1)
        part, present = _copy(copies, position, num_places, at, column, inside, width)
        if PARTS > 1:  # a copy lies in one of them at most
            other, there = _copy(copies_1, position_1, num_places_1, at, column, inside, width)
            part, present = part + other, present | there
        if PARTS > 2:
            other, there = _copy(copies_2, position_2, num_places_2, at, column, inside, width)
            part, present = part + other, present | there
        if WEIGHTED:
            part *= tl.load(weights + row * weight_stride + k, mask=present, other=0)[:, None]
        added += part
    tl.store(total + row[:, None] * width + column[None, :], added, mask=inside)


@triton.jit(**SIZES)
def _sum_backward_kernel(
    grad, copies, position, weights, to_copies, to_weights, num_rows, num_places, width,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for k in range(K):
        place = tl.load(position + row * K + k, mask=row < num_rows, other=num_places)
        present = place < num_places
        weight = tl.load(weights + row * K + k, mask=present, other=0)[:, None]
        products = tl.zeros([ROWS, BLOCK], tl.float32)
        # No step where no row of the tile has a k-th copy. From the second k on, grad comes from the cache.
        for start in range(0, width * tl.max(present.to(tl.int32)), BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = present[:, None] & (column < width)[None, :]
            at_place = place[:, None] * width + column[None, :]
            given = tl.load(grad + row[:, None] * width + column[None, :], mask=there, other=0).to(tl.float32)
            products += given * tl.load(copies + at_place, mask=there, other=0).to(tl.float32)
            tl.store(to_copies + at_place, given * weight, mask=there)
        tl.store(to_weights + row * K + k, tl.sum(products, 1), mask=row < num_rows)


def spread_rows(rows: Tensor, position: Tensor, num_places: int, padded: bool) -> Tensor:
    """[C, H] each row [N, H] at its places; where no copy lies: zeros if padded, else anything.

    The rows may be parts of longer ones: nothing is copied to make them contiguous.
    """
    empty = torch.zeros if padded else torch.empty
    copies = empty(num_places, rows.shape[1], dtype=rows.dtype, device=rows.device)
    (num_rows, width), num_choices = rows.shape, position.shape[1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if position.numel() and copies.numel():
        cut = tile(width)
        grid = (cover(num_rows, cut["ROWS"]), cover(width, cut["BLOCK"]))
        with torch.cuda.device_of(rows):
            _spread_kernel[grid](
                rows, position.contiguous(), copies, num_rows, num_places, width, rows.stride(0), K=num_choices, **cut,
            )  # fmt: skip
    return copies


def sum_rows(parts: Sequence[tuple[Tensor, Tensor]], weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, H] in dtype: the sum over k of weights[n, k] * copies[position[n, k]], ascending k, in float32.

    At most MOST_PARTS pairs of copies [C, H] and position [N, K]; a copy lies in one of them. The weights may be parts
    of longer rows.
    """
    parts = [(copies.contiguous(), position.contiguous()) for copies, position in parts]
    parts = [part for part in parts if part[0].numel()] or parts[:1]
    (copies, position), *_ = parts
    num_rows, num_choices, width = *position.shape, copies.shape[1]
    if not (position.numel() and copies.numel()):
        return torch.zeros(num_rows, width, dtype=dtype, device=copies.device)
    total = torch.empty(num_rows, width, dtype=dtype, device=copies.device)
    weight_stride = 0
    if weights is not None:
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        weight_stride = weights.stride(0)
    filled = [*parts, *[parts[0]] * (MOST_PARTS - len(parts))]  # what is not read
    places = [len(copies) for copies, _ in filled]
    cut = tile(width)
    grid = (cover(num_rows, cut["ROWS"]), cover(width, cut["BLOCK"]))
    with torch.cuda.device_of(copies):
        _sum_kernel[grid](
            *(of for part in filled for of in part), weights, total, num_rows, *places, width, weight_stride,
            K=num_choices, PARTS=len(parts), WEIGHTED=weights is not None, enable_fp_fusion=False, **cut,
        )  # fmt: skip
    return total


def sum_rows_backward(
    grad: Tensor, copies: Tensor, weights: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of sum_rows: to copies [C, H] (anything where no copy lies), to weights [N, K] (0 without a copy).

    grad [N, H] is read once from memory, then from the cache; a gradient to a weight is a dot product in float32.
    """
    to_copies = torch.empty_like(copies, memory_format=torch.contiguous_format)
    to_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    (num_places, width), (num_rows, num_choices) = copies.shape, position.shape
    if position.numel() and copies.numel():
        cut = tile(width)
        with torch.cuda.device_of(copies):
            _sum_backward_kernel[(cover(num_rows, cut["ROWS"]),)](
                grad.contiguous(), copies.contiguous(), position.contiguous(), weights.contiguous(),
                to_copies, to_weights, num_rows, num_places, width, K=num_choices,
                enable_fp_fusion=False, **cut,
            )  # fmt: skip
    return to_copies, to_weights
