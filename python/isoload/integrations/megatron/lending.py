"""Weights that a batch borrows, out of single Parameters and back: which moves a plan needs, and their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.placement.placement import Placement
from isoload.transport import Group
from isoload.weights.moves import Address, Move, add_back, move_rows


@dataclass(frozen=True)
class Loans:
    """What one batch borrows.

    moves   of all ranks: a rank's rows are the experts that it lends, ascending, and what it borrows, by slot
    lent    the experts that this rank lends
    places  this rank's row of every local slot that is borrowed
    """

    moves: list[Move]
    lent: list[int]
    places: dict[int, int]


def loans(placement: Placement, slots: Sequence[int], rank: int) -> Loans:
    """What every slot needs that is not its expert's home.

    placement: its first layer says where homes are. slots: [P] expert of every slot that has copies; -1 = none.
    """
    size, ranks = placement.slots_per_rank, placement.topology.num_ranks
    homes = placement.arrays[1][0].tolist()
    copies = [(p, e) for p, e in enumerate(slots) if e >= 0 and p != homes[e]]
    lent: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted({e for _, e in copies}):
        lent[homes[expert] // size].append(expert)
    row = {expert: i for of_rank in lent for i, expert in enumerate(of_rank)}
    places: list[dict[int, int]] = [{} for _ in range(ranks)]
    moves = []
    for p, e in copies:
        held = places[p // size]
        moves.append(Move(Address(homes[e] // size, row[e]), Address(p // size, len(held))))
        held[p % size] = len(held)
    return Loans(moves, lent[rank], places[rank])


class Lend(torch.autograd.Function):
    """Rows [N, H] and the lent experts' Parameters in; the rows and the borrowed stacks [n, ...] out.

    Rows pass through so that every rank enters the exchange of the gradients, also one that neither lends nor borrows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        moves: list[Move],
        num_borrowed: int,
        like: Sequence[Tensor],
        rows: Tensor,
        *lent: Tensor,
    ) -> tuple[Tensor, ...]:
        width = len(like)
        stacks = [
            torch.stack(lent[w::width]) if lent else weight.new_empty(0, *weight.shape)
            for w, weight in enumerate(like)
        ]
        pools = [weight.new_empty(num_borrowed, *weight.shape) for weight in like]
        move_rows(group, "borrow", moves, [stacks], [pools])
        ctx.group, ctx.moves, ctx.shapes = group, moves, [stack.shape for stack in stacks]
        return rows.view_as(rows), *pools

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        totals = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        add_back(ctx.group, "borrowed gradients", ctx.moves, [[g.contiguous() for g in grads]], [totals])
        of_experts = (weight for expert in zip(*totals, strict=True) for weight in expert)
        return None, None, None, None, rows, *of_experts
