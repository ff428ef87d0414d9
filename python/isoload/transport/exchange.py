"""The two differentiable exchanges: dispatch sends rows and combine returns them, each the other's backward.

Lists run over the ranks that the process owns. A node of the graph hangs on both functions on every rank, whatever
requires a gradient there: a rank without the node would not enter the collectives that the others wait in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.permutation import sum_rows
from isoload.results import RowLayout
from isoload.transport.group import Group
from isoload.transport.packing import as_bytes, pack, unpack
from isoload.transport.rows import RowMap, take_rows, with_own

Columns = list[tuple[Tensor, ...]]


def anchor() -> Tensor:
    """A scalar that makes what is computed from it require a gradient, where gradients are recorded at all."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


def unpack_payload(arrived: Sequence[Tensor], x: Tensor, weights: Tensor) -> Columns:
    """Rows [N, H], slots [N, K] int32 and weights [N, K] of every owned rank: views of what arrived."""
    layout = RowLayout.of(x, weights)
    rows, slots, gates = zip(*(layout.parts(buffer, x, weights) for buffer in arrived), strict=True)
    return [rows, slots, gates]


class Dispatch(torch.autograd.Function):
    """x [T, H], weights [T, K] -> link [], rows [N, H], slots [N, K], weights [N, K]; combine takes the link."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        maps: list[RowMap],
        payload: list[Tensor],
        _anchor: Tensor,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        x, weights = values[: len(maps)], values[len(maps) :]
        rows, local_slots, local_weights = unpack_payload(
            group.send("dispatch", payload, maps), x[0], weights[0]
        )
        ctx.group, ctx.maps = group, maps
        ctx.save_for_backward(*local_slots)
        ctx.mark_non_differentiable(*local_slots)
        return x[0].new_empty(()), *rows, *local_slots, *local_weights  # the link has no value

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
        returned = [unpack(b, layout) for b in ctx.group.send_back("dispatch backward", payload, maps)]
        grad_x = [sum_rows(g, m.token_to_rows) for (g, _), m in zip(returned, maps, strict=True)]
        grad_weights = [sum_rows(w, m.token_to_rows) for (_, w), m in zip(returned, maps, strict=True)]
        return *(None,) * 4, *grad_x, *grad_weights


class Combine(torch.autograd.Function):
    """y [N, H] and, if given, own contributions [T, H] -> [T, H].

    The link makes dispatch's backward run even where nothing else leads to it.
    """

    @staticmethod
    def forward(
        ctx: Any, group: Group, maps: list[RowMap], padded: bool, link: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        y, own = values[: len(maps)], values[len(maps) :]
        payload = [as_bytes(rows) for rows in y]
        ctx.group, ctx.maps, ctx.padded, ctx.has_own = group, maps, padded, bool(own)
        returned = [b.view(y[0].dtype) for b in group.send_back("combine", payload, maps)]
        positions = [m.token_to_rows for m in maps]
        if own:
            returned = [torch.cat(parts) for parts in zip(returned, own, strict=True)]
            positions = [with_own(m, rank) for m, rank in zip(maps, group.ranks, strict=True)]
        return tuple(sum_rows(rows, where) for rows, where in zip(returned, positions, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        payload = [as_bytes(take_rows(g, m, ctx.padded)) for g, m in zip(grads, ctx.maps, strict=True)]
        arrived = ctx.group.send("combine backward", payload, ctx.maps)
        to_y = [b.view(grads[0].dtype) for b in arrived]
        return None, None, None, grads[0].new_zeros(()), *to_y, *(grads if ctx.has_own else ())
