"""Dispatcher: takes every token to the ranks that hold its slots, and the experts' results back to the token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from isoload.transport.agreement import DTYPES
from isoload.transport.exchanges import Owned, Shared
from isoload.transport.group import Call, Group
from isoload.value_checks import values_readable

Handle = TypeVar("Handle")
# In the order of dispatch_facts
FACTS = ("hidden size of x", "dtype of x", "top-k of slots", "dtype of weights", "slots_per_rank")


@dataclass(frozen=True, eq=False)
class Received:
    """What one rank got.

    rows     [N, H]  in the dtype of x
    slots    [N, K]  int32 or int64, local slot 0..S-1 of the row's copies; -1 = absent (that copy went elsewhere)
    weights  [N, K]  gate weights, which the experts' side multiplies by; 0 where slots is -1
    handle           for combine; only the dispatcher that made it reads it
    max_copies       most copies there are, where the host has such a number: experts need no more memory
    ends             [S] if every row is of one copy (K = 1) and rows lie by slot: those of slot s before ends[s]

    A row whose slots are all -1 is padding. N, K and the order of rows are the dispatcher's own; rows, slots and
    weights may be parts of one buffer, not contiguous.
    """

    rows: Tensor
    slots: Tensor
    weights: Tensor
    handle: object
    max_copies: int | None = None
    ends: Sequence[int] | None = None


class Dispatcher(Shared, ABC):
    """Moves rows between the ranks of a group; lists run over the ranks that this process owns.

    Every rank makes the same calls in the same order, T = 0 included. Where gradients are recorded, dispatch is
    differentiable in x and weights and combine in y, and backward enters its exchanges on every rank whose combined
    result takes part in the loss, whatever else requires a gradient.

    max_tokens_per_rank  the fixed capacity: most tokens of a rank in a batch; None = any number
    host_waits           whether the host waits once in a dispatch, for how many rows come
    weights_at_source    whether combine multiplies by the gate weights, as DeepEP's low-latency mode does; Received
                         then has a row per copy and weights of 1
    adds_by_rank         whether combine adds by ascending rank, else by the place of a rank's last copy among a
                         token's choices, own contributions first
    adds_in_nodes        whether combine adds inside nodes first, by ascending rank, rounds to the dtype of the rows,
                         and then adds the nodes, the own contribution behind that of the rank's node
    dtypes               that rows may have
    hidden_multiple      what H must be a multiple of
    """

    group: Group
    max_tokens_per_rank: int | None = None
    host_waits: bool = True
    weights_at_source: bool = False
    adds_by_rank: bool = True
    adds_in_nodes: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    hidden_multiple: int = 1

    @abstractmethod
    def dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        """Sends every token to each rank that holds one of its slots.

        Args:
            x: [T, H] float64, float32, bfloat16 or float16 each; T may differ and be 0.
            slots: [T, K] int32 or int64 each, global: what :func:`isoload.route` returns; -1 = absent.
            weights: [T, K] float32 each; beside float64 x also float64, which keeps their gradients exact.
            slots_per_rank: S; slot p lives on rank p // S.
            call: whose facts travel with the row counts; where the host does not wait for these, they are compared
                where values are readable (on CPU; elsewhere under ISOLOAD_CHECK=1).

        Raises:
            ValueError: naming the argument, the rule and the value. The other ranks raise, too, naming rank and stage;
                where the host does not wait they do so on CPU, elsewhere only if the caller has told them by
                ``gather_loads``.
            RuntimeError: naming the stage, if a rank is gone.
        """

    @abstractmethod
    def combine(self, y: Owned, received: list[Received], own: Owned | None = None) -> Owned:
        """Returns every row to its token and adds up.

        Args:
            y: [N, H] each, in the dtype of the received rows: weighted and summed over the row's local copies.
            received: what dispatch returned.
            own: [T, H] each, in the dtype of y: the rank's contribution to its own tokens, computed without dispatch,
                0 for a token without one. It joins the sum at the rank's own place.

        Returns:
            [T, H] each: the plain sum, by ascending rank unless the dispatcher says otherwise, accumulated in
            max(float32, dtype) and rounded once; 0 for a token without copies.

        Raises:
            ValueError: naming the argument, the rule and the value.
            RuntimeError: naming the stage, if a rank is gone.
        """

    @abstractmethod
    def carry_failure(self, call: Call) -> None:
        """Takes part in the exchange in which the other ranks' dispatch waits for this one, where there is one.

        They raise, and so does this rank what has failed in the call.
        """

    def start_dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> Callable[[], list[Received]]:
        """:meth:`dispatch`, begun: what it returns waits for the rows, once; other work, and other exchanges, may come
        before that. Forward only: raises ValueError if gradients are recorded. Where a dispatcher has nothing of its
        own, the rows are there at once.
        """
        refuse_gradients()
        received = self.dispatch(x, slots, weights, slots_per_rank, call)
        return lambda: received

    def check_dispatch(self, x: Owned, slots: Owned, weights: Owned, call: Call | None) -> Call:
        """The call, for arguments of all owned ranks; else ValueError."""
        for name, given in (("x", x), ("slots", slots), ("weights", weights)):
            self.group.check_owned(name, given)
        return Call(self.group, device=x[0].device) if call is None else call

    def check_received(self, y: Owned, received: list[Received], kind: type[Handle]) -> list[Handle]:
        """The handles of what this dispatcher's dispatch returned, beside y of its shape; else ValueError."""
        self.group.check_owned("y", y)
        self.group.check_owned("received", received)
        handles = []
        for got in received:
            if not isinstance(got.handle, kind):
                found = type(got.handle).__name__
                raise ValueError(f"received must come from this dispatcher's dispatch, got a {found}")
            handles.append(got.handle)
        self._check_like("y", y, received, [len(got.rows) for got in received], "the received rows")
        return handles

    def check_own(self, own: Owned | None, received: list[Received], num_tokens: Sequence[int]) -> None:
        """Raises ValueError unless own contributions, if there are any, are of so many tokens of each owned rank."""
        if own is not None:
            self.group.check_owned("own", own)
            self._check_like("own", own, received, num_tokens, "the rank's tokens")

    def _check_like(
        self, name: str, given: Owned, received: list[Received], lengths: Sequence[int], whose: str
    ) -> None:
        for rank, rows, got, length in zip(self.group.ranks, given, received, lengths, strict=True):
            shape, dtype = [length, got.rows.shape[1]], got.rows.dtype
            if list(rows.shape) != shape or rows.dtype != dtype:
                raise ValueError(
                    f"{name} of rank {rank} must be {shape} {dtype} as {whose}, got {list(rows.shape)} {rows.dtype}"
                )


def refuse_gradients() -> None:
    """Raises ValueError where gradients are recorded."""
    if torch.is_grad_enabled():
        raise ValueError("start_dispatch must run under torch.no_grad(), got gradients recorded")


def dispatch_facts(
    rank: int, x: Tensor, slots: Tensor, weights: Tensor, slots_per_rank: int, num_ranks: int
) -> tuple[int, ...]:
    """FACTS of one rank's arguments.

    Raises:
        ValueError: naming the argument, the rule and the value. Where slots' values are not readable, one
            out of range is an absent copy.
    """
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
            f"weights of rank {rank} must be float32 (or float64 beside float64 x), got {weights.dtype}"
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
