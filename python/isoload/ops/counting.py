"""Count and number the copies of every expert, group copies by slot, and move rows to their copies and back.

Shapes: N rows of width H, at most K copies per row, C places. position [N, K] int64 is the place of each copy, and C or
more for an absent copy; source [C] int64 maps a place back to its row. A place belongs to at most one copy. Both
directions gather, so sums have the same order on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isoload import kernels
from isoload.checks import values_readable
from isoload.ops.library import call, ints, longs, op
from isoload.ops.results import PART_ROWS, Counted, Grouping, PackedRows, RowLayout, RowNumbers


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def spread_rows(
    rows: Tensor, position: Tensor, source: Tensor, padded: bool = False, per_row: int = 1
) -> Tensor:
    """Return [C, H], the row of every place, from rows [N, H]. `source` [C] has the row at every place or, with per_row
    = K, its copy ``n * K + k``. Places without a copy are undefined, or 0 with `padded`, where their source is N.
    """
    if kernels.fit(rows):
        from isoload.kernels import permutation  # imports Triton

        placed: Tensor = permutation.spread_rows(rows, position, len(source), padded)
        return placed
    if padded:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return rows.index_select(0, source if per_row == 1 else source // per_row)


def sum_rows(
    copies: Tensor,
    position: Tensor,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    more: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Return [N, H]: every row's copies [C, H], times their weights [N, K], added by ascending k in max(fp32, dtype).
    Values at places without a copy are not read. `more`: at most two further pairs of copies and position. Result in
    `dtype`, else that of the copies.
    """
    dtype = copies.dtype if dtype is None else dtype
    parts = [(copies, position), *more]
    if len(parts) > kernels.MOST_PARTS:
        raise ValueError(f"more must hold at most {kernels.MOST_PARTS - 1} parts, got {len(more)}")
    if kernels.fit(*(rows_of_part for rows_of_part, _ in parts), *(() if weights is None else (weights,))):
        from isoload.kernels import permutation  # imports Triton

        summed: Tensor = permutation.sum_rows(parts, weights, dtype)
        return summed
    exact = sum_dtype(copies.dtype)
    total = copies.new_zeros(len(position), copies.shape[1], dtype=exact)
    parts = [(rows_of_part, places_of_part) for rows_of_part, places_of_part in parts if len(rows_of_part)]
    readable = values_readable(position) and position.device.type == "cpu"
    columns = zip(*(places_of_part.unbind(1) for _, places_of_part in parts), strict=True)
    for k, of_part in enumerate(columns):  # one pass per k, so that [N, K, H] is never allocated
        for (rows_of_part, _), places in zip(parts, of_part, strict=True):
            present = places < len(rows_of_part)
            if readable:  # skip absent copies, the majority where tokens go to several ranks
                rows = present.nonzero().flatten()
                part = rows_of_part.index_select(0, places[rows]).to(exact)
                total.index_add_(0, rows, part if weights is None else part * weights[rows, k, None])
                continue
            part = rows_of_part.index_select(0, places.clamp(max=len(rows_of_part) - 1)).to(exact)
            if weights is not None:
                part = part * weights[:, k, None]
            # Masking, not a product with 0: the row read in place of an absent copy may contain inf and nan.
            total += part.masked_fill(present.logical_not().unsqueeze(1), 0)
    return total.to(dtype)


def sum_rows_backward(
    grad: Tensor, copies: Tensor, weights: Tensor, position: Tensor, copy: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a weighted :func:`sum_rows` for copies [C, H], undefined at places without a copy, and
    weights [N, K], 0 for absent copies. copy: ``n * K + k`` [C] at each place.
    """
    if kernels.fit(grad, copies, weights):
        from isoload.kernels import permutation  # imports Triton

        gradients: tuple[Tensor, Tensor] = permutation.sum_rows_backward(grad, copies, weights, position)
        return gradients
    spread = grad.index_select(0, copy // max(position.shape[1], 1)).to(sum_dtype(copies.dtype))
    to_copies = (spread * weights.flatten()[copy, None]).to(copies.dtype)
    dots = (spread * copies).sum(1)
    to_weights = torch.zeros_like(weights, dtype=dots.dtype)
    if len(copies):
        to_weights = dots[position.clamp(max=len(copies) - 1)].masked_fill(position >= len(copies), 0)
    return to_copies, to_weights.to(weights.dtype)


def gather_copies(rows: Tensor, grouping: Grouping) -> Tensor:
    """Return [C, H], the row of every sorted copy, from rows [N, H]; gradients add up in max(fp32, dtype)."""
    result: Tensor = _GatherCopies.apply(rows, grouping.copy, grouping.position)
    return result


def weighted_sum(
    parts: Sequence[tuple[Tensor, Grouping]], weights: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return [N, H] :func:`sum_rows` of at most three parts, rounded to a dtype; None = no rounding."""
    exact = sum_dtype(parts[0][0].dtype)
    tensors = [tensor for copies, grouping in parts for tensor in (copies, grouping.copy, grouping.position)]
    result: Tensor = _WeightedSum.apply(dtype or exact, weights, *tensors)
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
    def forward(ctx: Any, dtype: torch.dtype, weights: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *tensors)
        copies, position = tensors[::3], tensors[2::3]
        further = list(zip(copies[1:], position[1:], strict=True))
        return sum_rows(copies[0], position[0], weights, dtype, further)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *tensors = ctx.saved_tensors
        gradients: list[Tensor | None] = []
        to_weights = None
        for copies, copy, position in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True):
            to_copies, to_these = sum_rows_backward(grad, copies, weights, position, copy)
            # 0 for copies of another part
            to_weights = to_these if to_weights is None else to_weights + to_these
            gradients += [to_copies, None, None]
        return None, to_weights, *gradients


@op("count")
def _count(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, K = a.topk_ids.shape
    shape, experts = (T, K + a.num_shared), a.num_experts + a.num_shared
    parts = ints(a.topk_ids, (T + PART_ROWS - 1) // PART_ROWS, experts)
    columns = a.topk_ids.new_empty(shape if a.num_shared else (0, 0))
    return columns, ints(a.topk_ids, experts), ints(a.topk_ids, *shape), parts


def count(topk_ids: Tensor, num_experts: int, num_shared: int = 0) -> Counted:
    """Count the copies of each logical expert, and number the copies of each expert.

    Args:
        topk_ids: [T, K] int32 or int64; -1 = masked, not counted.
        num_experts: E.
        num_shared: n shared experts, with ids E and on, for every token with a routed choice: their columns are
            appended to the ids (-1 for a token without one) and counted, as of E + n experts.
    """
    columns, *outputs = call(_count, topk_ids, num_experts, num_shared)
    return Counted(columns if num_shared else topk_ids, *outputs)


@op("number_rows")
def _number_rows(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (a.slots.shape[0], min(a.slots.shape[1], a.num_ranks))
    return ints(a.slots, *shape), ints(a.slots, *shape), longs(a.slots, 2, a.num_ranks)


def number_rows(slots: Tensor, slots_per_rank: int, num_ranks: int) -> RowNumbers:
    """Number the rows to every rank by token. A token is one row to each rank that has one of its slots.

    Args:
        slots: [T, K] int32 or int64; values outside 0..R*S-1 are absent copies.
        slots_per_rank: S; slot p is on rank p // S.
        num_ranks: R.
    """
    return RowNumbers(*call(_number_rows, slots, slots_per_rank, num_ranks))


@op("group_copies")
def _group_copies(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    copy, slot = longs(a.slots, a.num_places), longs(a.slots, a.num_places)
    return copy, slot, ints(a.slots, a.num_slots), longs(a.slots, *a.slots.shape)


def group_copies(slots: Tensor, first: int, num_slots: int, num_places: int | None = None) -> Grouping:
    """Sort the copies of local slots ``first .. first + num_slots - 1`` by slot, then row, then k.

    Args:
        slots: [N, K] int32 or int64 local slots; -1 = absent, as are the slots of other groups.
        first: the group's first local slot.
        num_slots: S.
        num_places: C, the most copies of the group; None = N*K. More raise ValueError on CPU; on CUDA they count as
            absent and set the device's error word.
    """
    places = slots.numel() if num_places is None else num_places
    return Grouping(*call(_group_copies, slots, first, num_slots, places))


@op("pack_rows")
def _pack_rows(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    payload = a.slots.new_empty((a.num_rows, a.bytes), dtype=torch.uint8)
    return payload, longs(a.slots, a.num_rows), longs(a.slots, a.num_rows), longs(a.slots, *a.ranks.shape)


def pack_rows(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    rows: RowNumbers,
    slots_per_rank: int,
    num_rows: int,
    capacity: int | None = None,
) -> PackedRows:
    """Pack rows by destination, then token; padding rows have slots -1, weights 0 and values 0.

    Args:
        x: [T, H] of any dtype.
        slots: [T, K] int32 or int64, as passed to :func:`number_rows`.
        weights: [T, K] float32 or float64.
        rows: result of :func:`number_rows`.
        slots_per_rank: S.
        num_rows: n, the rows to all ranks; with a capacity R times that.
        capacity: C; rows to destination d start at d * C. None: rows of the destinations follow without gaps.
    """
    layout = RowLayout.of(x, weights)
    size = 0 if capacity is None else capacity
    return PackedRows(*call(_pack_rows, x, slots, weights, *rows, slots_per_rank, num_rows, size, *layout))
