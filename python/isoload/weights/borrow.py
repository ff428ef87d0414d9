"""Borrowing: a layer's way to the weights that a plan's spare slots ask for, for one batch.

The pool that holds them is made once and shared by all layers of a group whose experts have the same shapes, so
its memory is constant whatever the routing. It has two buffers that layers take in turn. By the time of backward
another layer may have filled the buffer again: then backward brings the weights once more, into the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isoload.records import Plan
from isoload.transport.group import Group
from isoload.weights.backends import BackEnd, Stacks
from isoload.weights.layout import Residence
from isoload.weights.loans import Loans
from isoload.weights.storage import RankWeights

NUM_BUFFERS = 2


class SparePool:
    """NUM_BUFFERS times the spare stacks [spare_slots, ...] of every owned rank, and whose weights they hold now."""

    def __init__(self, like: Stacks, spare_slots: int) -> None:
        try:
            self.buffers: list[Stacks] = [
                [[s.new_zeros(spare_slots, *s.shape[1:]) for s in stacks] for stacks in like]
                for _ in range(NUM_BUFFERS)
            ]
        except RuntimeError as error:
            one = sum(s.shape[1:].numel() * s.itemsize for s in like[0])
            raise ValueError(
                f"spare_slots must fit in memory, {NUM_BUFFERS} times {spare_slots} experts of {one} bytes, got {error}"
            ) from error
        self.holds: list[weakref.ref[Borrowed] | None] = [None] * NUM_BUFFERS
        self._next = 0

    def take(self) -> int:
        """The buffer whose turn it is."""
        self._next = (self._next + 1) % NUM_BUFFERS
        return self._next


class Borrowing:
    """How one layer borrows.

    Args:
        group: joins the ranks.
        ranks: the owned ones.
        spare_slots: of every rank.
        back_end: that brings the weights.
    """

    def __init__(
        self, group: Group, ranks: Sequence[RankWeights], spare_slots: int, back_end: BackEnd
    ) -> None:
        self.group, self.ranks, self.back_end = group, ranks, back_end
        self.spare_slots = spare_slots
        self._home: dict[torch.device, Tensor] = {}
        assert self.pool  # made now

    @property
    def pool(self) -> SparePool:
        """The group's one for experts like these, as they are now."""
        stacks, spare = [rank.stored_rows() for rank in self.ranks], self.spare_slots
        layout = ("spare pool", spare, *((s.shape[1:], s.dtype, s.device) for s in stacks[0]))
        return self.group.memo(layout, lambda: SparePool(stacks, spare))

    def settle(self, held: Sequence[Residence], num_experts: int) -> None:
        """Learns which rank and weight row is every expert's home."""
        home = [(-1, -1)] * num_experts
        for rank, residence in enumerate(held):
            for row, expert in enumerate(residence.homes):
                home[expert] = rank, row
        self._home_rows = home
        for table in self._home.values():  # in place: captured graphs hold its address
            table.copy_(torch.tensor(home, dtype=torch.int32))

    def borrow(self, plan: Plan) -> Borrowed | None:
        """Begins to bring what the plan lends; None where the host knows that it lends nothing."""
        slots, num_ranks = plan.slot_to_expert, self.group.topology.num_ranks
        if slots.device not in self._home:
            self._home[slots.device] = torch.tensor(self._home_rows, dtype=torch.int32, device=slots.device)
        loans = Loans(slots, self._home[slots.device], self._home_rows, num_ranks, self.spare_slots)
        if loans.on_host and not loans.each:
            return None
        borrowed = Borrowed(self, loans)
        borrowed.begin("borrow")
        return borrowed


class Borrowed:
    """What one batch borrowed."""

    def __init__(self, borrowing: Borrowing, loans: Loans) -> None:
        self.loans = loans
        self._of, self._pool = borrowing, borrowing.pool
        self._buffer = self._pool.take()
        self._start: Callable[[], Callable[[], None]] | None = None
        self._finish: Callable[[], None] | None = None

    @property
    def pools(self) -> Stacks:
        """Every owned rank's spare stacks: the weights, after :meth:`wait`."""
        return self._pool.buffers[self._buffer]

    def begin(self, stage: str) -> None:
        """Begins to bring the weights, unless the buffer still holds them: so it is on every rank, or on none."""
        if self._is_held():
            return
        self._pool.holds[self._buffer] = weakref.ref(self)
        lent = [rank.stored_rows() for rank in self._of.ranks]
        back_end = self._of.back_end
        self._start = lambda: back_end.start(stage, self.loans, lent, self.pools)
        if self.loans.on_host or not back_end.reads_plan:
            self.proceed()
        else:
            self.loans.ask()

    def proceed(self) -> None:
        """To be called once the host has waited for something later than the plan: the plan's copy is there now."""
        if self._start is None:
            return
        if self._of.back_end.reads_plan and not self.loans.has_arrived:
            self._of.group.traffic.host_syncs += 1
        start, self._start = self._start, None
        self._finish = start()

    def wait(self) -> None:
        """The weights are in the pools, for what is computed from here on."""
        if not self._is_held():
            raise RuntimeError(
                "borrowed weights must be used before others take their place, got the pool of others"
            )
        self.proceed()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def _is_held(self) -> bool:
        """Whether the buffer is this batch's."""
        holder = self._pool.holds[self._buffer]
        return holder is not None and holder() is self

    def give_back(self, grads: Stacks, totals: Stacks) -> None:
        """Adds the gradients [spare_slots, ...] of the pools to the homes' totals."""
        self.wait()  # also where no copy was computed
        self._of.back_end.give_back("borrowed gradients", self.loans, grads, totals)
