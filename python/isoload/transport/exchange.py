"""The two differentiable exchanges: dispatch sends rows and combine returns them, each the other's backward.

Lists run over the ranks that the process owns. A node of the graph hangs on both functions on every rank, whatever
requires a gradient there: a rank without the node would not enter the collectives that the others wait in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.permutation import sum_rows
from isoload.transport.rows import RowMap, local_copies, pack, take_rows, unpack

if TYPE_CHECKING:
    from isoload.transport.base import Transport


def anchor() -> Tensor:
    """A scalar that makes what is computed from it require a gradient, where gradients are recorded at all."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


class Dispatch(torch.autograd.Function):
    """x [T, H], weights [T, K] -> link [], rows [N, H], slots [N, K], weights [N, K]; combine takes the link."""

    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        maps: list[RowMap],
        slots_per_rank: int,
        slots: list[Tensor],
        _anchor: Tensor,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        x, weights = values[: len(maps)], values[len(maps) :]
        padded = transport.max_tokens_per_rank is not None
        payload = []
        for r, m in enumerate(maps):
            copies = local_copies(slots[r], weights[r], m, slots_per_rank, padded)
            payload.append(pack(take_rows(x[r], m, padded), *copies))
        top_k = slots[0].shape[1]
        layout = [(x[0].shape[1], x[0].dtype), (top_k, torch.int32), (top_k, weights[0].dtype)]
        arrived = [unpack(buffer, layout) for buffer in transport.send("dispatch", payload, maps)]
        rows, local_slots, local_weights = zip(*arrived, strict=True)
        local_slots = tuple(s.long() for s in local_slots)
        ctx.transport, ctx.maps = transport, maps
        ctx.save_for_backward(*local_slots)
        ctx.mark_non_differentiable(*local_slots)
        return x[0].new_zeros(()), *rows, *local_slots, *local_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _link: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        maps, slots = ctx.maps, ctx.saved_tensors
        rows, weights = grads[: len(maps)], grads[2 * len(maps) :]
        layout = [(rows[0].shape[1], rows[0].dtype), (weights[0].shape[1], weights[0].dtype)]
        # a copy's weight went to one rank: zeros from the others make the sum exact
        payload = [
            pack(g.contiguous(), w.masked_fill(s < 0, 0).contiguous())
            for g, w, s in zip(rows, weights, slots, strict=True)
        ]
        returned = [unpack(b, layout) for b in ctx.transport.send_back("dispatch backward", payload, maps)]
        grad_x = [sum_rows(g, m.token_to_rows) for (g, _), m in zip(returned, maps, strict=True)]
        grad_weights = [sum_rows(w, m.token_to_rows) for (_, w), m in zip(returned, maps, strict=True)]
        return None, None, None, None, None, *grad_x, *grad_weights


class Combine(torch.autograd.Function):
    """y [N, H] -> [T, H]. The link makes dispatch's backward run even where nothing else leads to it."""

    @staticmethod
    def forward(
        ctx: Any, transport: Transport, maps: list[RowMap], link: Tensor, *y: Tensor
    ) -> tuple[Tensor, ...]:
        payload = [pack(rows.contiguous()) for rows in y]
        ctx.transport, ctx.maps = transport, maps
        returned = [b.view(y[0].dtype) for b in transport.send_back("combine", payload, maps)]
        return tuple(sum_rows(rows, m.token_to_rows) for rows, m in zip(returned, maps, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        padded = ctx.transport.max_tokens_per_rank is not None
        payload = [pack(take_rows(g, m, padded)) for g, m in zip(grads, ctx.maps, strict=True)]
        arrived = ctx.transport.send("combine backward", payload, ctx.maps)
        return None, None, grads[0].new_zeros(()), *(b.view(grads[0].dtype) for b in arrived)
