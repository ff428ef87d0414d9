"""borrow, borrow_backward: weights of borrowed experts come from home by address, their gradients return; wrappers
and fakes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from isoload.ops.library import call, op

_borrow, _borrow_backward = op("borrow", lambda a: None), op("borrow_backward", lambda a: None)


def addresses(stacks_per_rank: Sequence[Sequence[Tensor]]) -> Tensor:
    """The table of addresses by which :func:`borrow` reaches the stacks of ranks that share this process.

    The table keeps no memory alive: hold the stacks as long as it is used.

    Args:
        stacks_per_rank: [R][W] contiguous tensors, [rows, ...] each; stack w has rows of one shape and dtype on every
            rank.

    Returns:
        [R, W] int64 on the device of the first stack; 0 for a stack without rows.
    """
    first = stacks_per_rank[0] if stacks_per_rank else []
    if not first:
        raise ValueError("stacks_per_rank must hold at least one rank with one stack, got none")
    for rank, stacks in enumerate(stacks_per_rank):
        if len(stacks) != len(first):
            raise ValueError(
                f"stacks_per_rank must be {len(first)} of every rank, got {len(stacks)} of rank {rank}"
            )
        for w, (stack, other) in enumerate(zip(stacks, first, strict=True)):
            if not stack.is_contiguous():
                raise ValueError(
                    f"stacks_per_rank must be contiguous, got other strides in stack {w} of rank {rank}"
                )
            if (stack.dtype, stack.shape[1:]) != (other.dtype, other.shape[1:]):
                raise ValueError(
                    f"stacks_per_rank must have equal rows on every rank, {other.dtype} {list(other.shape[1:])} in "
                    f"stack {w}, got {stack.dtype} {list(stack.shape[1:])} of rank {rank}"
                )
    table = [[stack.data_ptr() for stack in stacks] for stacks in stacks_per_rank]
    return torch.tensor(table, dtype=torch.int64, device=first[0].device)


def borrow(
    slot_to_expert: Tensor,
    home: Tensor,
    peers: Tensor,
    spare: Sequence[Tensor],
    num_ranks: int,
    rank: int,
    *,
    blocks: int = 32,
) -> None:
    """Copies the weights of the experts in a rank's spare slots from their homes, byte for byte.

    One kernel per eight stacks, led by the plan on the device. The homes' weights must be in place before, on every
    rank, and stay until it has run; the op orders nothing between ranks.

    Args:
        slot_to_expert: [P] int32, of a plan; the last spare_slots of every rank hold borrowed experts, -1 = empty.
        home: [E, 2] int32 rank and weight row of every expert's home; (-1, -1) = none.
        peers: [R, W] int64 address of row 0 of stack w on rank r, as this rank reaches it (:func:`addresses`); 0 =
            none. Rows there are as long as those of ``spare[w]``.
        spare: W stacks [spare_slots, ...] of any dtype, contiguous; rows of filled slots are written, others stay.
        num_ranks: R, divides P.
        rank: this rank.
        blocks: the most thread blocks on CUDA; the rest of the device stays free for what runs beside.

    Where an expert or its home is out of range, or an address 0, CUDA leaves the row as it is.
    """
    call(_borrow, slot_to_expert, home, peers, list(spare), num_ranks, rank, blocks)
    # autograd must find that rows it saved are overwritten; the op alone does not tell it
    increment_version(spare)


def borrow_backward(
    slot_to_expert: Tensor,
    home: Tensor,
    peers: Tensor,
    totals: Sequence[Tensor],
    num_ranks: int,
    rank: int,
    spare_slots: int,
    dtype: torch.dtype,
    *,
    blocks: int = 32,
) -> None:
    """Adds the gradients of a rank's lent experts to its home rows: borrowing ranks in order, their slots in order.

    The order is fixed, so the sum has the same bits on every device and every time (a NaN stays a NaN).

    Args:
        slot_to_expert, home, num_ranks, rank: as in :func:`borrow`.
        peers: [R, W] int64 address of row 0 of rank r's gradient pool of stack w, [spare_slots, ...]; 0 = none.
        totals: W stacks [homes, ...], contiguous, read and written: of the pools' dtype, where sums made in
            max(float32, dtype) are rounded once; or float32 beside bfloat16 and float16 pools.
        spare_slots: rows of every pool.
        dtype: of the pools: float64, float32, bfloat16 or float16.
        blocks: the most thread blocks on CUDA.

    Where an expert or its home is out of range, or an address 0, CUDA adds nothing.
    """
    on = (num_ranks, rank, spare_slots, dtype, blocks)
    call(_borrow_backward, slot_to_expert, home, peers, list(totals), *on)
    increment_version(totals)
