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


@dataclass(frozen=True)
class Grouping:
    """Where the copies of one group of slots lie once they are sorted by slot (stable: then by row, then by k).

    Fields:
        copy      [C] int64  the copy ``n * K + k`` at each place
        slot      [C] int64  its slot within the group; S-1 in the tail
        ends      [S] int32  slot s's copies end before place ``ends[s]``: the offsets of a grouped GEMM
        position  [N, K] int64  the place of copy (n, k); any place where it is absent
        present   [N, K] bool  whether copy (n, k) belongs to this group
    """

    copy: Tensor
    slot: Tensor
    ends: Tensor
    position: Tensor
    present: Tensor


def group_copies(slots: Tensor, first: int, num_slots: int, num_copies: int | None = None) -> Grouping:
    """Sorts the copies of local slots ``first .. first + num_slots - 1``; others count as absent.

    Args:
        slots: [N, K] int64 local slots; -1 = absent.
        first: the group's first local slot.
        num_slots: S.
        num_copies: copies present, where the host knows them: buffers then hold no more. None: N*K.
    """
    local = slots - first
    present = (local >= 0) & (local < num_slots)
    key, copy = torch.sort(torch.where(present, local, num_slots).flatten(), stable=True)
    places = torch.arange(copy.numel(), device=copy.device)
    # One place at least: absent copies must have some place to point to.
    held = len(copy) if num_copies is None else min(max(num_copies, 1), len(copy))
    bounds = torch.arange(num_slots, device=key.device)
    ends = torch.searchsorted(key, bounds, right=True, out_int32=True).clamp(max=held)
    position = torch.empty_like(copy).scatter_(0, copy, places).clamp(max=max(held - 1, 0))
    slot = key[:held].clamp(max=max(num_slots - 1, 0))
    return Grouping(copy[:held], slot, ends, position.view(slots.shape), present)


def gather_copies(rows: Tensor, grouping: Grouping) -> Tensor:
    """[C, H] the row of every sorted copy, from rows [N, H]; gradients add up in max(fp32, dtype)."""
    result: Tensor = _GatherCopies.apply(rows, grouping.copy, grouping.position, grouping.present)
    return result


def weighted_sum(copies: Tensor, weights: Tensor, grouping: Grouping) -> Tensor:
    """[N, H] the sum over k of ``weights[n, k] * copies[position[n, k]]``, ascending k, in max(fp32, dtype).

    Args:
        copies: [C, H] in slot order.
        weights: [N, K] gate weights; those of absent copies are not used and get gradient 0.
        grouping: of the copies.
    """
    result: Tensor = _WeightedSum.apply(copies, weights, grouping.copy, grouping.position, grouping.present)
    return result


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """max(fp32, dtype): what sums over copies are accumulated in."""
    return torch.promote_types(dtype, torch.float32)


def _sum_copies(copies: Tensor, position: Tensor, present: Tensor, weights: Tensor | None) -> Tensor:
    """The sum behind both directions; one pass per k keeps [N, K, H] from existing."""
    total = copies.new_zeros(len(position), copies.shape[1], dtype=sum_dtype(copies.dtype))
    for k in range(position.shape[1]):
        part = copies.index_select(0, position[:, k])
        if weights is not None:
            part = part * weights[:, k, None]
        # where, not a product with 0: the tail may hold inf and nan.
        total = total + torch.where(present[:, k, None], part, 0)
    return total


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copy: Tensor, position: Tensor, present: Tensor) -> Tensor:
        ctx.save_for_backward(position, present)
        return rows.index_select(0, copy // max(position.shape[1], 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        position, present = ctx.saved_tensors
        return _sum_copies(grad, position, present, None).to(grad.dtype), None, None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies: Tensor, weights: Tensor, copy: Tensor, position: Tensor, present: Tensor
    ) -> Tensor:
        ctx.save_for_backward(copies, weights, copy, position, present)
        return _sum_copies(copies, position, present, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        copies, weights, copy, position, present = ctx.saved_tensors
        spread = grad.index_select(0, copy // max(position.shape[1], 1))
        to_copies = (spread * weights.flatten()[copy, None]).to(copies.dtype)
        dots = (spread * copies).sum(1)
        to_weights = torch.where(present, dots[position], 0).to(weights.dtype)
        return to_copies, to_weights, None, None, None
