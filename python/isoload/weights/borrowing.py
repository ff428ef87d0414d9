"""Borrowing: copies the weights of a plan's spare slots for one batch, and returns their gradients.

All layers of a group with experts of the same shapes share one pool of two buffers, which they use alternately: if
another layer has overwritten a buffer, backward copies the weights once more. In autograd, Parameters are inputs and
all rows, replica and borrowed rows included, are outputs, so gradients return to the home rows and an optimizer updates
each expert once. Every rank enters this function in every backward, so no exchange waits for a rank without a gradient.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils import get_total_norm

from isoload.checks import capturing
from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import Group
from isoload.weights.backends import Backend, BorrowPlan
from isoload.weights.experts import BorrowedWeights, ExpertWeights
from isoload.weights.layout import Layout, Move, Stacks, add_back, home_addresses
from isoload.weights.storage import RankWeights, lie_in

NUM_BUFFERS = 2


class SparePool:
    """Spare stacks [spare_slots, ...] of every owned rank, NUM_BUFFERS times, and the batch that uses each."""

    def __init__(self, like: Stacks, spare_slots: int, backend: Backend) -> None:
        try:
            with torch.inference_mode(False):  # otherwise only inference mode could write them
                self.buffers: list[Stacks] = [
                    [[backend.new_spare(s, spare_slots) for s in stacks] for stacks in like]
                    for _ in range(NUM_BUFFERS)
                ]
        except RuntimeError as error:
            expert_bytes = sum(s.shape[1:].numel() * s.itemsize for s in like[0])
            raise ValueError(
                f"spare_slots must fit in memory, {NUM_BUFFERS} times {spare_slots} experts of {expert_bytes} bytes, "
                f"got {error}"
            ) from error
        self.holds: list[weakref.ref[Borrowed] | None] = [None] * NUM_BUFFERS
        self.in_graphs = False  # whether captured CUDA graphs write to the buffers
        self._next = 0

    def take(self, in_use: int | None = None) -> int:
        self._next = (self._next + 1) % NUM_BUFFERS
        if self._next == in_use:
            self._next = (self._next + 1) % NUM_BUFFERS
        return self._next


class Borrowing:
    """Borrowing of one layer, for the owned ranks."""

    def __init__(
        self,
        group: Group,
        ranks: Sequence[RankWeights],
        spare_slots: int,
        backend: Backend,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.ranks, self.backend = group, ranks, backend
        self.spare_slots = spare_slots
        self._take_dtype(dtype)
        self._home: dict[torch.device, Tensor] = {}
        assert self.pool  # made by note_layouts

    @property
    def pool(self) -> SparePool:
        dtype, spare = self.dtype, self.spare_slots
        stacks = [rank.stored_rows() for rank in self.ranks]
        if dtype is not None:  # only sizes and dtype are read
            stacks = [[stack[:0].to(dtype) for stack in rank_stacks] for rank_stacks in stacks]
        key = ("spare pool", self.backend.name, spare, *((s.shape[1:], s.dtype, s.device) for s in stacks[0]))
        return self.group.memo(key, lambda: SparePool(stacks, spare, self.backend))

    def _take_dtype(self, dtype: torch.dtype | None) -> None:
        """Set the dtype in which weights travel; None, and for peers that read them in place: their own."""
        self.dtype = None if self.backend.reads_peers else dtype

    def note_layouts(self, layouts: Sequence[Layout], num_experts: int) -> None:
        self._home_rows = home_addresses(layouts)
        self._home_table = [self._home_rows.get(expert, (-1, -1)) for expert in range(num_experts)]
        for table in self._home.values():  # in place: captured graphs contain its address
            table.copy_(torch.tensor(self._home_table, dtype=torch.int32))

    def check(self, weights: RankWeights) -> None:
        apart = len(self.group.ranks) < self.group.topology.num_ranks
        if apart and self.backend.reads_peers and not weights.shows_storage():
            raise ValueError(
                "borrow must be all_to_all or deep_ep where expert Parameters have memory of their own "
                f"(p.data = x, a flat buffer, functional_call or parametrize), got {self.backend.name!r}"
            )

    @property
    def waits_for_plan(self) -> bool:
        """Whether the host needs a plan from a device before weights can travel."""
        return self.backend.reads_moves and self.ranks[0].row_of_slot.device.type != "cpu"

    def borrow(
        self, filled: PlacedLayers, in_use: Borrowed | None = None, dtype: torch.dtype | None = None
    ) -> Borrowed | None:
        """Begin to copy the experts of filled spare slots, not into the buffer of `in_use`, with which a layer still
        computes; return None if the host finds that there are none. dtype: in which experts compute; None: their own.
        """
        self._take_dtype(dtype)
        slots, num_ranks = filled.slot_to_expert, self.group.topology.num_ranks
        if slots.device not in self._home:
            with torch.inference_mode(False):
                table = torch.tensor(self._home_table, dtype=torch.int32, device=slots.device)
                self._home[slots.device] = table
        wanted = BorrowPlan(slots, self._home[slots.device], self._home_rows, num_ranks, self.spare_slots)
        if wanted.on_host and not wanted.moves:
            return None
        borrowed = Borrowed(self, wanted, in_use)
        borrowed.begin("borrow")
        return borrowed


class Borrowed:
    """The experts that one batch borrowed."""

    def __init__(self, borrowing: Borrowing, plan: BorrowPlan, in_use: Borrowed | None = None) -> None:
        self.plan = plan
        self._borrowing, self._pool, self._dtype = borrowing, borrowing.pool, borrowing.dtype
        self._buffer: int = self._pool.take(None if in_use is None else in_use._buffer)
        # Kept for backward: by then a Parameter may have other memory (functional_call).
        self._homes = [rank.readable_homes() for rank in borrowing.ranks]
        # Called in backward when this batch's weights travel, to fetch those that backward needs next
        self.then: Callable[[Borrowed], None] | None = None
        self._backward = -1  # number of the last backward that fetched the weights again
        self._start: Callable[[], Callable[[], None]] | None = None
        self._finish: Callable[[], None] | None = None

    def shares_buffer(self, other: Borrowed) -> bool:
        return self._buffer == other._buffer

    @property
    def pools(self) -> Stacks:
        """Every owned rank's spare stacks: the weights, after :meth:`wait`."""
        return self._pool.buffers[self._buffer]

    def begin_backward(self) -> None:
        """Begin to copy the weights for the nodes that run later in this backward."""
        self._backward = torch._C._current_graph_task_id()
        self.begin("borrow backward")

    def begin(self, stage: str) -> None:
        """Begin to copy the weights unless the buffer still holds them, which is the case on all ranks or on none."""
        if self._has_buffer():
            return
        self._pool.holds[self._buffer] = weakref.ref(self)
        self._pool.in_graphs |= capturing(self.plan.slot_to_expert.device)
        backend = self._borrowing.backend
        self._start = lambda: backend.start(stage, self.plan, self._sources(), self.pools)
        if self.plan.on_host or not backend.reads_moves:
            self.proceed()
        else:
            self.plan.start_copy()

    def _sources(self) -> Stacks:
        if (dtype := self._dtype) is None:
            return self._homes
        return [[stack.detach().to(dtype) for stack in rank_stacks] for rank_stacks in self._homes]

    def proceed(self) -> None:
        """Continue, without a wait if the host has waited for work later than the plan, whose copy has then arrived."""
        if self._start is None:
            return
        if self._borrowing.backend.reads_moves and not self.plan.has_arrived:
            self._borrowing.group.traffic.host_syncs += 1
        start, self._start = self._start, None
        self._finish = start()

    def wait(self) -> bool:
        """Wait until the weights are in the pools; return whether they are there. They may be overwritten in a backward
        that computes only gradients of weights, after one that computed those of the inputs (zero-bubble schedules).
        """
        if not self._has_buffer():
            if torch._C._current_graph_task_id() not in (-1, self._backward) and self._backward != -1:
                return False
            raise RuntimeError(
                "borrowed weights must be used before others take their place, got the pool of others"
            )
        self.proceed()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def _has_buffer(self) -> bool:
        holder = self._pool.holds[self._buffer]
        return holder is not None and holder() is self

    def add_back(self, grads: Stacks, totals: Stacks) -> None:
        self._borrowing.backend.add_back("borrowed gradients", self.plan, grads, totals)


class JoinRows(torch.autograd.Function):
    """Parameters in, weight rows and borrowed stacks out; the gradients of their rows return to the home rows.

    Inputs: received rows, then every owned rank's Parameters. Outputs: the same rows, then every rank's weight rows and
    spare stacks of stacks that train. Rows pass through so that every rank enters the exchange of the gradients. Weight
    rows are whole storages or, if Parameters have other memory, the Parameters followed by the replica rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        ranks: Sequence[RankWeights],
        trained: Sequence[bool],
        resident: Stacks,
        replicas: Sequence[Move],
        borrowed: Borrowed | None,
        noted: dict[str, Tensor],
        dtype: torch.dtype | None,
        num_passed: int,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.ranks, ctx.trained = group, ranks, trained
        ctx.num_homes = [len(rank.layout.homes) for rank in ranks]
        ctx.noted, ctx.num_passed, ctx.divisor = noted, num_passed, ranks[0].gradient_divisor
        ctx.replicas, ctx.borrowed, ctx.own_dtype = replicas, borrowed, resident[0][0].dtype
        ctx.overflows = dtype is torch.float16 and not group.owns_all
        # Saved so that a change is detected: after .to() or a copy, no storage's version counts a step on a Parameter.
        ctx.save_for_backward(*noted.values(), *values[num_passed:])
        joined = [
            [in_dtype(s, dtype) for s in compress(rank_stacks, cycle(trained))] for rank_stacks in resident
        ]
        ctx.widths = list(map(len, joined))
        pools = [] if borrowed is None else borrowed.pools
        joined += [list(compress(rank_stacks, trained)) for rank_stacks in pools]
        stacks = [stack.detach() for rank_stacks in joined for stack in rank_stacks]
        return *(rows.view_as(rows) for rows in values[:num_passed]), *stacks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_recomputed(ctx.noted, ctx.saved_tensors)
        rows, stacks = grads[: ctx.num_passed], grads[ctx.num_passed :]
        if ctx.borrowed is not None:
            ctx.borrowed.wait()  # also if no copy was computed: others may wait for this rank's gradients
        totals = iter(_totals(ctx, stacks) if stacks else ())
        for rank in ctx.ranks if stacks else ():
            rank.had_gradients = True
        flags = [trains for _ in ctx.num_homes for trains in ctx.trained]
        return *(None,) * 9, *rows, *(next(totals) if trains else None for trains in flags)


def _totals(ctx: Any, stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of every rank's home rows, with replicas and borrowed rows, of the stacks that train."""
    joined, borrowed = sum(ctx.widths), len(stacks) - sum(ctx.widths)
    grads = split(stacks, ctx.widths)
    spare = split(stacks[joined:], [borrowed // len(ctx.widths)] * len(ctx.widths))
    width, dtype = sum(ctx.trained), stacks[0].dtype
    # Incoming gradients are only read: a caller may pass the same tensors to backward again, as schedules do that
    # compute the gradients of inputs and of weights at different times. Sums get memory of their own.
    adds = bool(ctx.replicas) or ctx.borrowed is not None or ctx.divisor != 1 or ctx.overflows
    # Rows that have replicas and are also borrowed would be rounded twice: their sums stay exact in between. The same
    # holds for gradients of stacks that compute in another dtype than their Parameters'.
    twice = bool(ctx.replicas) and ctx.borrowed is not None
    wide = torch.promote_types(torch.promote_types(dtype, ctx.own_dtype), torch.float32)
    exact = wide if twice or dtype != ctx.own_dtype else dtype
    totals, replicas = [], []
    for count, rank_grads in zip(ctx.num_homes, grads, strict=True):
        totals.append([home_gradient(g, count, exact, copy=adds) for g in rank_grads[:width]])
        replicas.append([g[count:] for g in rank_grads] if len(rank_grads) == width else rank_grads[width:])
    if ctx.replicas:
        add_back(ctx.group, "replica gradients", ctx.replicas, replicas, totals)
    if ctx.borrowed is not None:
        ctx.borrowed.add_back(spare, totals)
    if ctx.divisor != 1:
        totals = [[total.div_(ctx.divisor) for total in rank_grads] for rank_grads in totals]
    totals = [[total.to(ctx.own_dtype) for total in rank_grads] for rank_grads in totals]
    if ctx.overflows:
        share_overflow(ctx.group, totals)
    return [total for rank_grads in totals for total in rank_grads]


def share_overflow(group: Group, totals: Stacks) -> None:
    """Make a gradient of every rank infinite if one is not finite, so that a loss scaler skips on all ranks."""
    filled = [[total for total in rank_grads if len(total)] for rank_grads in totals]
    norms = [get_total_norm(rank_grads, math.inf).float().reshape(1) for rank_grads in filled]
    norms = [norm.to(totals[0][0].device) for norm in norms]  # torch returns the norm of nothing on the CPU
    overflow = ~group.gather("overflow", norms).isfinite().all()
    for total in (total for rank_grads in filled for total in rank_grads):
        total.view(-1)[:1].masked_fill_(overflow, math.inf)


def in_dtype(stack: Tensor, dtype: torch.dtype | None) -> Tensor:
    return stack.detach() if dtype is None else stack.detach().to(dtype)


def home_gradient(stack: Tensor, count: int, dtype: torch.dtype, copy: bool) -> Tensor:
    """Return the first rows [count, ...] of an incoming gradient [rows, ...] in a dtype, with memory of their own."""
    if len(stack) == count and not copy:
        return stack.contiguous()  # the gradient itself: nothing writes to it
    return stack[:count].to(dtype, copy=True, memory_format=torch.contiguous_format)


def split(values: Sequence[Tensor], widths: Sequence[int]) -> list[list[Tensor]]:
    remaining = iter(values)
    return [list(islice(remaining, width)) for width in widths]


def check_recomputed(noted: dict[str, Tensor], saved: Sequence[Tensor]) -> None:
    """Raise if a checkpoint (use_reentrant=False) recomputed the layer with other choices than in the first forward."""
    for (name, first), again in zip(noted.items(), saved, strict=False):
        if not torch.equal(first, again):
            raise RuntimeError(
                f"{name} must be the same when a checkpoint recomputes the layer, got others: "
                "the gate must make the same choices for the same rows"
            )


def trained_stacks(homes_of_ranks: Sequence[Sequence[Tensor]]) -> list[bool]:
    """Return by stack whether the home rows require gradients, on any of these ranks."""
    trained: list[bool] = []
    for homes in homes_of_ranks:
        trained = trained or [False] * len(homes)
        for i, home in enumerate(homes):
            trained[i] |= home.requires_grad
    return trained


def join_rows(
    group: Group,
    ranks: Sequence[RankWeights],
    rows: Sequence[Tensor],
    replicas: Sequence[Move],
    borrowed: Borrowed | None,
    noted: dict[str, Tensor],
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[list[ExpertWeights]]]:
    """Return received rows and, for every owned rank, stacks of all its rows and borrowed rows, connected in autograd.

    Stacks whose Parameters require no gradient get none. With `replicas` (the moves to all replica rows) or `borrowed`
    experts of any rank, backward exchanges gradients on every rank. dtype: in which the resident stacks compute.
    """
    homes: list[list[Tensor]] = []
    resident: list[list[Tensor]] = []
    for rank in ranks:
        rank_stacks, stored = rank.home_rows(), rank.stored_rows()
        homes.append(rank_stacks)
        resident.append(stored if lie_in(rank_stacks, stored) else [*rank_stacks, *rank.replica_rows()])
    trained = trained_stacks(homes)
    # Otherwise the weights keep the node alive.
    passes = bool(replicas) or borrowed is not None or not any(trained) or dtype is torch.float16
    passed = list(rows) if passes else []
    inputs = [*passed, *(stack for rank_stacks in homes for stack in rank_stacks)]
    out: Iterator[Tensor] = iter(
        JoinRows.apply(
            group, ranks, trained, resident, replicas, borrowed, noted, dtype, len(passed), *inputs
        )
    )
    rows = [next(out) for _ in passed] if passes else list(rows)

    def joined(stacks: Sequence[Tensor], dtype: torch.dtype | None = dtype) -> list[Tensor]:
        return [next(out) if t else in_dtype(s, dtype) for s, t in zip(stacks, cycle(trained), strict=False)]

    groups = []
    for rank, rank_stacks in zip(ranks, map(joined, resident), strict=True):
        width = len(trained)
        expert_weights = [
            ExpertWeights(**rank.by_name(rank_stacks[i : i + width]))
            for i in range(0, len(rank_stacks), width)
        ]
        groups.append([expert_weights[0], *(weights for weights in expert_weights[1:] if weights.num_slots)])
    if borrowed is not None:
        for parts, rank, spare in zip(
            groups, ranks, (joined(rank_stacks, None) for rank_stacks in borrowed.pools), strict=True
        ):
            parts.append(BorrowedWeights(**rank.by_name(spare), wait=borrowed.wait))
    return rows, groups


class BringAgain(torch.autograd.Function):
    """Passes every rank's rows through; its backward copies the weights again before earlier nodes run."""

    @staticmethod
    def forward(ctx: Any, borrowed: Borrowed, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.borrowed = borrowed
        ctx.save_for_backward(rows[0].new_zeros(()))
        return tuple(r.view_as(r) for r in rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # a checkpoint recomputes now and takes buffers of the pool, not later
        ctx.borrowed.begin_backward()
        ctx.borrowed.proceed()
        if ctx.borrowed.then is not None:
            ctx.borrowed.then(ctx.borrowed)
        return None, *grads
