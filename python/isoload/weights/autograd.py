"""The layer's weights joined to autograd: Parameters in, all rows out, replica and borrowed ones included.

Gradients of replica rows and of borrowed rows return to the home rows, so an optimizer sees each expert once. One
function does it, and every rank enters it in every backward: no exchange waits for a rank that has nothing to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.experts.weights import BorrowedWeights, ExpertWeights
from isoload.transport import Group
from isoload.weights.borrow import Borrowed
from isoload.weights.moves import Move, add_back
from isoload.weights.storage import RankWeights


class JoinRows(torch.autograd.Function):
    """Parameters in, all weight rows and borrowed stacks out; the gradients of their rows return to the home rows.

    Inputs, for all owned ranks: received rows (none where no gradient travels), then every rank's Parameters; outputs:
    the same rows, then every rank's weight rows, then every rank's spare stacks if any are borrowed. Rows pass through
    so that every rank, also one that holds no weights, enters the exchange of the gradients. Weight rows are whole
    storages or, where Parameters lie elsewhere, the Parameters and then the storages' replica rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        ranks: Sequence[RankWeights],
        replicas: Sequence[Move],
        borrowed: Borrowed | None,
        noted: dict[str, Tensor],
        num_passed: int,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.num_homes = group, [len(rank.layout.homes) for rank in ranks]
        ctx.noted, ctx.num_passed, ctx.divisor = noted, num_passed, ranks[0].gradient_divisor
        ctx.replicas, ctx.borrowed = replicas, borrowed
        # Saved to be found changed: after .to() or a copy, a step on a Parameter shows in no storage's version.
        ctx.save_for_backward(*noted.values(), *values[num_passed:])
        homes = cut(values[num_passed:], len(ranks))
        ctx.whole = [rank.shows_storage() for rank in ranks]
        held = [
            rank.stored_rows() if whole else [*own, *rank.replica_rows()]
            for rank, whole, own in zip(ranks, ctx.whole, homes, strict=True)
        ]
        ctx.widths = list(map(len, held))
        stored = [stack.detach() for stacks in held for stack in stacks]
        spare = [] if borrowed is None else [stack.detach() for stacks in borrowed.pools for stack in stacks]
        return *(rows.view_as(rows) for rows in values[:num_passed]), *stored, *spare

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_recomputed(ctx.noted, ctx.saved_tensors)
        rows, stacks = grads[: ctx.num_passed], grads[ctx.num_passed :]
        held, spare = split(stacks, ctx.widths), cut(stacks[sum(ctx.widths) :], len(ctx.widths))
        # The gradients are this node's own: nothing but run_experts made them. Rows are added in place.
        homes, replicas = [], []
        for whole, count, own in zip(ctx.whole, ctx.num_homes, held, strict=True):
            half = len(own) if whole else len(own) // 2
            homes.append([first_rows(g, count) for g in own[:half]])
            replicas.append([g[count:] for g in own] if whole else own[half:])
        if ctx.replicas:
            exact = torch.promote_types(stacks[0].dtype, torch.float32)
            # Rows with replicas that are borrowed, too, would be rounded twice: then the sums stay exact in between.
            both = ctx.borrowed is not None
            totals = [[g.to(exact) for g in own] for own in homes] if both else homes
            add_back(ctx.group, "replica gradients", ctx.replicas, replicas, totals)
        else:
            totals = homes
        if ctx.borrowed is not None:
            ctx.borrowed.add_back(spare, totals)
        dtype = stacks[0].dtype
        if ctx.divisor != 1:
            totals = [[total.div_(ctx.divisor) for total in own] for own in totals]
        return *(None,) * 6, *rows, *(total.to(dtype) for own in totals for total in own)


def first_rows(grad: Tensor, count: int) -> Tensor:
    """The home rows of a storage's gradient, contiguous: itself if it has no others, which a view would keep alive."""
    return grad.contiguous() if len(grad) == count else grad.narrow(0, 0, count).clone()


def cut(values: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Equal parts, in order."""
    width = len(values) // parts
    return [list(values[i * width : (i + 1) * width]) for i in range(parts)]


def split(values: Sequence[Tensor], widths: Sequence[int]) -> list[list[Tensor]]:
    """Parts of these widths, in order; others may follow."""
    rest = iter(values)
    return [list(islice(rest, width)) for width in widths]


def check_recomputed(noted: dict[str, Tensor], saved: Sequence[Tensor]) -> None:
    """Raises if a checkpoint (use_reentrant=False) recomputed the layer with other choices than the first time.

    The node keeps what the first forward noted; saved tensors are the recompute's. Without one they are the same
    tensors, which costs no comparison. The reentrant checkpoint keeps no node of the first forward to compare with.
    """
    for (name, first), again in zip(noted.items(), saved, strict=False):
        if not torch.equal(first, again):
            raise RuntimeError(
                f"{name} must be the same when a checkpoint recomputes the layer, got others: "
                "the gate must choose alike for the same rows"
            )


def join_rows(
    group: Group,
    ranks: Sequence[RankWeights],
    rows: Sequence[Tensor],
    replicas: Sequence[Move],
    borrowed: Borrowed | None,
    noted: dict[str, Tensor],
) -> tuple[list[Tensor], list[list[ExpertWeights]]]:
    """Received rows and, for every owned rank, stacks of all its rows and of what it borrowed, joined to autograd.

    Args:
        group: joins the ranks.
        ranks: the owned ones.
        rows: [N, H] each.
        replicas: the moves from home rows to all replica rows; if there are any, backward exchanges gradients, on every
            rank.
        borrowed: by any rank: then it does so, too.
        noted: what a recompute must find again, see :func:`check_recomputed`.
    """
    passed = list(rows) if replicas or borrowed is not None else []
    homes = [stack for rank in ranks for stack in rank.home_rows()]
    out: tuple[Tensor, ...] = JoinRows.apply(
        group, ranks, replicas, borrowed, noted, len(passed), *passed, *homes
    )
    stacks = out[len(passed) :]
    per_rank = len(homes) // len(ranks)
    widths = [per_rank if rank.shows_storage() else 2 * per_rank for rank in ranks]
    groups = []
    for rank, own in zip(ranks, split(stacks, widths), strict=True):
        made = [ExpertWeights(**rank.by_name(own[i : i + per_rank])) for i in range(0, len(own), per_rank)]
        groups.append([made[0], *(weights for weights in made[1:] if weights.num_slots)])
    if borrowed is not None:
        for parts, rank, spare in zip(groups, ranks, cut(stacks[sum(widths) :], len(ranks)), strict=True):
            parts.append(BorrowedWeights(**rank.by_name(spare), wait=borrowed.wait))
    return (list(out[: len(passed)]) if passed else list(rows)), groups


class _BringAgain(torch.autograd.Function):
    """Identity; before anything behind it goes backward, the weights are brought again. Every rank enters it."""

    @staticmethod
    def forward(ctx: Any, borrowed: Borrowed, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.borrowed = borrowed
        ctx.save_for_backward(rows[0].new_zeros(()))
        return tuple(r.view_as(r) for r in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint recomputes now, which takes buffers of the pool, and not later
        ctx.borrowed.begin("borrow backward")
        ctx.borrowed.proceed()
        return None, *grads


def bring_again(borrowed: Borrowed, rows: list[Tensor]) -> list[Tensor]:
    """The owned ranks' outputs [N, H], joined to autograd so that backward has the borrowed weights."""
    joined: tuple[Tensor, ...] = _BringAgain.apply(borrowed, *rows)
    return list(joined)
