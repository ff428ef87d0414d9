"""The rows that travel: a token goes once to every rank that holds a slot of its, and comes back by the same map.

Dispatch sends rows and combine returns them, each the other's backward. Lists run over the ranks that the process owns.
A node of the graph hangs on both functions on every rank, whatever requires a gradient there: a rank without the node
would not enter the collectives that the others wait in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.ops.counting import spread_rows, sum_rows
from isoload.ops.results import RowLayout
from isoload.transport.exchanges import SendCounts
from isoload.transport.group import Group

Columns = list[tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class RowMap(SendCounts):
    """Which rows a rank sends (n of them, by destination, then token) and how many it gets.

    row_to_token   [n] int64     T where the row is padding
    row_to_rank    [n] int64     destination, R where the row is padding; where rows go to nodes, a node
    token_to_rows  [T, D] int64  the token's rows by ascending destination, n where there is none
    own            the destination that the rank itself belongs to
    """

    row_to_token: Tensor
    row_to_rank: Tensor
    token_to_rows: Tensor
    own: int


def with_own(map_: RowMap) -> Tensor:
    """[T, D + 1] token_to_rows where row n + t is the own contribution of token t, at the rank's place.

    It comes behind the token's row from the rank itself, if there is one. n + T is no row.
    """
    num_rows, (tokens, _) = len(map_.row_to_rank), map_.token_to_rows.shape
    nowhere = len(map_.sent)
    row_to_rank = torch.cat([map_.row_to_rank, map_.row_to_rank.new_full((1,), nowhere)])
    ranks = torch.cat([row_to_rank[map_.token_to_rows], row_to_rank.new_full((tokens, 1), map_.own)], dim=1)
    own = torch.arange(num_rows, num_rows + tokens, device=ranks.device).unsqueeze(1)
    absent = map_.token_to_rows == num_rows
    rows = torch.cat([map_.token_to_rows.masked_fill(absent, num_rows + tokens), own], dim=1)
    return rows.gather(1, ranks.argsort(dim=1, stable=True))


def as_bytes(rows: Tensor) -> Tensor:
    """[n, bytes] uint8: rows [n, F] in their own memory, where they are contiguous."""
    if not rows.is_contiguous():  # not contiguous(), which fake tensors on a GPU cannot on torch's CPU build
        rows = rows.clone(memory_format=torch.contiguous_format)
    # by way of one dimension: rows of one value may have stride 0 and still be contiguous
    return rows.flatten().view(torch.uint8).view(len(rows), rows.shape[1] * rows.itemsize)


def pack(*columns: Tensor) -> Tensor:
    """[n, bytes] uint8: contiguous columns [n, F] side by side."""
    return torch.cat([as_bytes(column) for column in columns], dim=1)


def unpack(buffer: Tensor, layout: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """The columns of a packed buffer, given their widths and dtypes."""
    parts = buffer.split([width * dtype.itemsize for width, dtype in layout], dim=1)
    # clone, not contiguous(): a single row is contiguous already, at an offset that may suit no dtype
    return [
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, (_, dtype) in zip(parts, layout, strict=True)
    ]


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
        ctx: Any, group: Group, maps: list[RowMap], payload: list[Tensor], _anchor: Tensor, *values: Tensor
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
            positions = list(map(with_own, maps))
        return tuple(sum_rows(rows, where) for rows, where in zip(returned, positions, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        payload = [
            as_bytes(spread_rows(g, m.token_to_rows, m.row_to_token, ctx.padded))  # zeros in padding rows
            for g, m in zip(grads, ctx.maps, strict=True)
        ]
        arrived = ctx.group.send("combine backward", payload, ctx.maps)
        to_y = [b.view(grads[0].dtype) for b in arrived]
        return None, None, None, grads[0].new_zeros(()), *to_y, *(grads if ctx.has_own else ())
