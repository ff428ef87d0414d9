"""Borrowing: brings the weights of a plan's spare slots for one batch, and returns their gradients.

The pool that holds them is made once and shared by all layers of a group whose experts have the same shapes, so
its memory is constant whatever the routing. It has two buffers that layers take in turn. By the time of backward
another layer may have filled the buffer again: then backward brings the weights once more, into the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import Group
from isoload.value_checks import capturing
from isoload.weights.backend import Backend, BorrowPlan
from isoload.weights.layout import Layout, home_addresses
from isoload.weights.moves import Stacks
from isoload.weights.storage import RankWeights

NUM_BUFFERS = 2


class SparePool:
    """NUM_BUFFERS times the spare stacks [spare_slots, ...] of every owned rank, and the batch that each serves."""

    def __init__(self, like: Stacks, spare_slots: int, backend: Backend) -> None:
        try:
            with torch.inference_mode(False):  # else only inference could write them
                self.buffers: list[Stacks] = [
                    [[backend.new_spare(s, spare_slots) for s in stacks] for stacks in like]
                    for _ in range(NUM_BUFFERS)
                ]
        except RuntimeError as error:
            one = sum(s.shape[1:].numel() * s.itemsize for s in like[0])
            raise ValueError(
                f"spare_slots must fit in memory, {NUM_BUFFERS} times {spare_slots} experts of {one} bytes, got {error}"
            ) from error
        self.holds: list[weakref.ref[Borrowed] | None] = [None] * NUM_BUFFERS
        self.in_graphs = False  # whether captured CUDA graphs write to the buffers
        self._next = 0

    def take(self, in_use: int | None = None) -> int:
        """The buffer whose turn it is, but for one that is in use."""
        self._next = (self._next + 1) % NUM_BUFFERS
        if self._next == in_use:
            self._next = (self._next + 1) % NUM_BUFFERS
        return self._next


class Borrowing:
    """How one layer borrows for the owned ranks."""

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
        assert self.pool  # made now

    @property
    def pool(self) -> SparePool:
        """The group's one for experts like these, as they are now."""
        dtype, spare = self.dtype, self.spare_slots
        stacks = [rank.stored_rows() for rank in self.ranks]
        if dtype is not None:
            stacks = [
                [stack[:0].to(dtype) for stack in own] for own in stacks
            ]  # sizes and dtype alone are read
        key = ("spare pool", self.backend.name, spare, *((s.shape[1:], s.dtype, s.device) for s in stacks[0]))
        return self.group.memo(key, lambda: SparePool(stacks, spare, self.backend))

    def _take_dtype(self, dtype: torch.dtype | None) -> None:
        """Note the dtype in which weights travel from now on; None: their own.

        Peers read the weights where their home rank keeps them, and so in their own dtype: experts are then computed
        from a cast copy.
        """
        self.dtype = None if self.backend.reads_peers else dtype

    def note_layouts(self, layouts: Sequence[Layout], num_experts: int) -> None:
        """Takes the layouts [R] of all ranks: where every expert's home row is."""
        self._home_rows = home_addresses(layouts)
        self._home_table = [self._home_rows.get(expert, (-1, -1)) for expert in range(num_experts)]
        for table in self._home.values():  # in place: captured graphs hold its address
            table.copy_(torch.tensor(self._home_table, dtype=torch.int32))

    def check(self, weights: RankWeights) -> None:
        """Raises ValueError if other ranks would read home rows in memory that they cannot reach."""
        apart = len(self.group.ranks) < self.group.topology.num_ranks
        if apart and self.backend.reads_peers and not weights.shows_storage():
            raise ValueError(
                "borrow must be all_to_all or deep_ep where expert Parameters have memory of their own "
                f"(p.data = x, a flat buffer, functional_call or parametrize), got {self.backend.name!r}"
            )

    @property
    def waits_for_plan(self) -> bool:
        """Whether the host must have a plan from a device before weights can travel."""
        return self.backend.reads_moves and self.ranks[0].row_of_slot.device.type != "cpu"

    def borrow(
        self, filled: PlacedLayers, in_use: Borrowed | None = None, dtype: torch.dtype | None = None
    ) -> Borrowed | None:
        """Begins to bring the experts of filled spare slots; None where there are none, as far as the host can read.

        Args:
            filled: the slots.
            in_use: whose buffer stays as it is, since a layer still computes with it.
            dtype: in which experts compute; None: the weights' own.
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
        self._of, self._pool, self._dtype = borrowing, borrowing.pool, borrowing.dtype
        self._buffer: int = self._pool.take(None if in_use is None else in_use._buffer)
        # Kept for backward: by then a Parameter may have other memory (functional_call).
        self._homes = [rank.readable_homes() for rank in borrowing.ranks]
        self._start: Callable[[], Callable[[], None]] | None = None
        self._finish: Callable[[], None] | None = None

    @property
    def pools(self) -> Stacks:
        """Every owned rank's spare stacks: the weights, after :meth:`wait`."""
        return self._pool.buffers[self._buffer]

    def begin(self, stage: str) -> None:
        """Begins to bring the weights, unless the buffer still holds them: so it is on every rank, or on none."""
        if self._has_buffer():
            return
        self._pool.holds[self._buffer] = weakref.ref(self)
        self._pool.in_graphs |= capturing(self.plan.slot_to_expert.device)
        backend = self._of.backend
        self._start = lambda: backend.start(stage, self.plan, self._sources(), self.pools)
        if self.plan.on_host or not backend.reads_moves:
            self.proceed()
        else:
            self.plan.start_copy()

    def _sources(self) -> Stacks:
        """The home rows in the dtype in which they travel."""
        if (dtype := self._dtype) is None:
            return self._homes
        return [[stack.detach().to(dtype) for stack in own] for own in self._homes]

    def proceed(self) -> None:
        """To be called once the host has waited for something later than the plan: the plan's copy is there now."""
        if self._start is None:
            return
        if self._of.backend.reads_moves and not self.plan.has_arrived:
            self._of.group.traffic.host_syncs += 1
        start, self._start = self._start, None
        self._finish = start()

    def wait(self) -> None:
        """The weights are in the pools, for what is computed from here on."""
        if not self._has_buffer():
            raise RuntimeError(
                "borrowed weights must be used before others take their place, got the pool of others"
            )
        self.proceed()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def _has_buffer(self) -> bool:
        """Whether the buffer is this batch's."""
        holder = self._pool.holds[self._buffer]
        return holder is not None and holder() is self

    def add_back(self, grads: Stacks, totals: Stacks) -> None:
        """Adds the gradients [spare_slots, ...] of the pools to the homes' totals."""
        self._of.backend.add_back("borrowed gradients", self.plan, grads, totals)
