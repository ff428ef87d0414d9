"""Dispatcher: sends tokens to the ranks of their slots, and returns the results to the tokens.

Each of dispatch and combine is the other's backward. A node of the autograd graph depends on both on every rank:
without it a rank that needs no gradient would not enter the collectives for which other ranks wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.checks import values_readable
from isoload.ops.counting import spread_rows, sum_rows
from isoload.ops.results import RowLayout
from isoload.transport.exchanges import Owned, SendCounts, Shared
from isoload.transport.group import DTYPES, Call, Group

Handle = TypeVar("Handle")
# In the order of dispatch_facts.
FACTS = ("hidden size of x", "dtype of x", "top-k of slots", "dtype of weights", "slots_per_rank")


@dataclass(frozen=True, eq=False)
class Received:
    """Rows that one rank received, in the dispatcher's order; all slots of a padding row are -1."""

    rows: Tensor  # [N, H] in the dtype of x
    # [N, K] int32 or int64, local slots 0..S-1 of the row's copies; -1 = that copy went elsewhere
    slots: Tensor
    weights: Tensor  # [N, K] gate weights, which the experts' side multiplies by; 0 where slots is -1
    handle: object  # for combine of the dispatcher that made it
    # Upper bound of the copies, if the host has one: limits the experts' memory
    max_copies: int | None = None
    # [S] if K = 1 and rows are sorted by slot: rows of slot s end at ends[s]
    ends: Sequence[int] | None = None


class Dispatcher(Shared, ABC):
    """Moves rows between the ranks of a group; lists are indexed by the ranks that this process owns. Every rank makes
    the same calls in the same order, T = 0 included; backward too, if its combined result takes part in the loss.
    """

    group: Group
    # The fixed capacity: most tokens of a rank in a batch; None = any number
    max_tokens_per_rank: int | None = None
    host_waits: bool = True  # once in a dispatch, for the number of received rows
    # Whether combine multiplies by the gate weights: then Received has a row per copy and weights of 1.
    weights_at_source: bool = False
    # Whether combine adds by ascending rank; otherwise by the place of a rank's last copy among a token's choices,
    # own contributions first.
    adds_by_rank: bool = True
    # Whether combine first adds inside nodes, by ascending rank, rounds to the dtype of the rows, and then adds the
    # nodes, with the own contribution after the sum of the rank's node.
    adds_in_nodes: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    hidden_multiple: int = 1  # H must be a multiple of it

    @abstractmethod
    def dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        """Send every token to each rank that has one of its slots. Differentiable in x and weights.

        If an argument is wrong, all ranks raise; on a GPU without row counts only if ``gather_loads`` transmitted the
        failure.

        Args:
            x: [T, H] float64, float32, bfloat16 or float16 each; T may differ and be 0.
            slots: [T, K] int32 or int64 each, global: the result of :func:`isoload.route`; -1 = absent.
            weights: [T, K] float32 each; with float64 x also float64, which keeps their gradients exact.
            slots_per_rank: S; slot p is on rank p // S.
            call: its facts travel with the row counts, or are compared where values are readable.
        """

    @abstractmethod
    def combine(self, y: Owned, received: list[Received], own: Owned | None = None) -> Owned:
        """Return every row to its token and add up: [T, H] each, 0 for a token without copies. Differentiable in y.

        Sums are accumulated in max(float32, dtype) and rounded once, by ascending rank unless the attributes differ.

        Args:
            y: [N, H] each, in the dtype of the received rows: weighted and summed over the row's local copies.
            received: result of dispatch.
            own: [T, H] each: the rank's contribution to its own tokens without dispatch; added in the rank's position.
        """

    @abstractmethod
    def carry_failure(self, call: Call) -> None:
        """Take part in the exchange of a dispatch, if any, so that the other ranks raise; then raise the failure."""

    def start_dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> Callable[[], list[Received]]:
        """Begin :meth:`dispatch`, without gradients; return a function that waits for the rows, to be called once."""
        refuse_gradients()
        received = self.dispatch(x, slots, weights, slots_per_rank, call)
        return lambda: received

    def check_dispatch(self, x: Owned, slots: Owned, weights: Owned, call: Call | None) -> Call:
        """Return the call after checking that all arguments have an entry per owned rank; else raise ValueError."""
        for name, tensors in (("x", x), ("slots", slots), ("weights", weights)):
            self.group.check_owned(name, tensors)
        return Call(self.group, device=x[0].device) if call is None else call

    def check_received(self, y: Owned, received: list[Received], kind: type[Handle]) -> list[Handle]:
        """Return the handles of this dispatcher's dispatch after checking the shape of y; else raise ValueError."""
        self.group.check_owned("y", y)
        self.group.check_owned("received", received)
        handles = []
        for batch in received:
            if not isinstance(batch.handle, kind):
                name = type(batch.handle).__name__
                raise ValueError(f"received must come from this dispatcher's dispatch, got a {name}")
            handles.append(batch.handle)
        self._check_like("y", y, received, [len(batch.rows) for batch in received], "the received rows")
        return handles

    def check_own(self, local: Owned | None, received: list[Received], num_tokens: Sequence[int]) -> None:
        if local is not None:
            self.group.check_owned("own", local)
            self._check_like("own", local, received, num_tokens, "the rank's tokens")

    def _check_like(
        self, name: str, tensors: Owned, received: list[Received], lengths: Sequence[int], reason: str
    ) -> None:
        for rank, rows, batch, length in zip(self.group.ranks, tensors, received, lengths, strict=True):
            shape, dtype = [length, batch.rows.shape[1]], batch.rows.dtype
            if list(rows.shape) != shape or rows.dtype != dtype:
                raise ValueError(
                    f"{name} of rank {rank} must be {shape} {dtype} as {reason}, got {list(rows.shape)} {rows.dtype}"
                )


def refuse_gradients() -> None:
    if torch.is_grad_enabled():
        raise ValueError("start_dispatch must run under torch.no_grad(), got gradients recorded")


def dispatch_facts(
    rank: int, x: Tensor, slots: Tensor, weights: Tensor, slots_per_rank: int, num_ranks: int
) -> tuple[int, ...]:
    """Return FACTS of one rank's arguments, or raise ValueError. Slots are checked where values are readable."""
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"x of rank {rank} must be [T, H] of {', '.join(map(str, DTYPES))}, got {list(x.shape)} {x.dtype}"
        )
    if slots.dim() != 2 or len(slots) != len(x) or not slots.shape[1]:
        raise ValueError(f"slots of rank {rank} must be [{len(x)}, K], K >= 1, got {list(slots.shape)}")
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots of rank {rank} must be int32 or int64, got {slots.dtype}")
    if weights.shape != slots.shape:
        raise ValueError(
            f"weights of rank {rank} must be {list(slots.shape)} as slots, got {list(weights.shape)}"
        )
    if weights.dtype not in (torch.float32, torch.promote_types(torch.float32, x.dtype)):
        raise ValueError(
            f"weights of rank {rank} must be float32 (or float64 with float64 x), got {weights.dtype}"
        )
    if not x.device == slots.device == weights.device:
        raise ValueError(
            f"x, slots and weights of rank {rank} must be on one device, "
            f"got {x.device}, {slots.device}, {weights.device}"
        )
    if slots_per_rank < 1:
        raise ValueError(f"slots_per_rank must be at least 1, got {slots_per_rank}")
    if values_readable(slots):
        last = num_ranks * slots_per_rank - 1
        if (wrong := slots[(slots < -1) | (slots > last)]).numel():
            raise ValueError(f"slots of rank {rank} must be in -1..{last}, got {int(wrong[0])}")
    return (x.shape[1], DTYPES.index(x.dtype), slots.shape[1], DTYPES.index(weights.dtype), slots_per_rank)


Columns = list[tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class RowMap(SendCounts):
    """The rows that a rank sends (n of them, by destination, then token) and how many it receives."""

    row_to_token: Tensor  # [n] int64, T where the row is padding
    row_to_rank: Tensor  # [n] int64, destination, R where the row is padding; where rows go to nodes, a node
    token_to_rows: Tensor  # [T, D] int64, the token's rows by ascending destination, n for none
    own: int  # the destination to which the rank itself belongs


def with_own(map_: RowMap) -> Tensor:
    """Return [T, D + 1] token_to_rows with row n + t, a token's own contribution, in the rank's own position."""
    num_rows, (tokens, _) = len(map_.row_to_rank), map_.token_to_rows.shape
    nowhere = len(map_.sent)
    row_to_rank = torch.cat([map_.row_to_rank, map_.row_to_rank.new_full((1,), nowhere)])
    ranks = torch.cat([row_to_rank[map_.token_to_rows], row_to_rank.new_full((tokens, 1), map_.own)], dim=1)
    local = torch.arange(num_rows, num_rows + tokens, device=ranks.device).unsqueeze(1)
    absent = map_.token_to_rows == num_rows
    rows = torch.cat([map_.token_to_rows.masked_fill(absent, num_rows + tokens), local], dim=1)
    return rows.gather(1, ranks.argsort(dim=1, stable=True))


def as_bytes(rows: Tensor) -> Tensor:
    """Return [n, bytes] uint8: a view of rows [n, F] if they are contiguous, else a copy."""
    if not rows.is_contiguous():  # not contiguous(), which fails for fake CUDA tensors on torch's CPU build
        rows = rows.clone(memory_format=torch.contiguous_format)
    # Via one dimension: rows of one value may have stride 0 and still be contiguous.
    return rows.flatten().view(torch.uint8).view(len(rows), rows.shape[1] * rows.itemsize)


def pack(*columns: Tensor) -> Tensor:
    return torch.cat([as_bytes(column) for column in columns], dim=1)


def unpack(buffer: Tensor, layout: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    parts = buffer.split([width * dtype.itemsize for width, dtype in layout], dim=1)
    # clone, not contiguous(): a single row is contiguous already, at an offset that may not be aligned for its dtype.
    return [
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, (_, dtype) in zip(parts, layout, strict=True)
    ]


def anchor() -> Tensor:
    """Return a scalar that requires a gradient if gradients are recorded, so that results computed from it do too."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


def unpack_payload(arrived: Sequence[Tensor], x: Tensor, weights: Tensor) -> Columns:
    """Return rows [N, H], slots [N, K] int32 and weights [N, K] of every owned rank: views of the received bytes."""
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
        # The weight of a copy went to one rank: zeros from other ranks keep the sum exact.
        payload = [
            pack(g.contiguous(), w.masked_fill(s < 0, 0).contiguous())
            for g, w, s in zip(rows, weights, slots, strict=True)
        ]
        returned = [unpack(b, layout) for b in ctx.group.send_back("dispatch backward", payload, maps)]
        grad_x = [sum_rows(g, m.token_to_rows) for (g, _), m in zip(returned, maps, strict=True)]
        grad_weights = [sum_rows(w, m.token_to_rows) for (_, w), m in zip(returned, maps, strict=True)]
        return *(None,) * 4, *grad_x, *grad_weights


class Combine(torch.autograd.Function):
    """y [N, H], optionally own [T, H] -> [T, H]. The link makes dispatch's backward run in every case."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, maps: list[RowMap], padded: bool, link: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        y, local = values[: len(maps)], values[len(maps) :]
        payload = [as_bytes(rows) for rows in y]
        ctx.group, ctx.maps, ctx.padded, ctx.has_own = group, maps, padded, bool(local)
        returned = [b.view(y[0].dtype) for b in group.send_back("combine", payload, maps)]
        positions = [m.token_to_rows for m in maps]
        if local:
            returned = [torch.cat(parts) for parts in zip(returned, local, strict=True)]
            positions = list(map(with_own, maps))
        return tuple(sum_rows(rows, position) for rows, position in zip(returned, positions, strict=True))

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
