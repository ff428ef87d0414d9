"""Backends of borrowing: how weights reach spare slots and gradients return; the choice of a backend.

sources: every owned rank's W weight stacks [rows, ...]; pools: its W spare stacks [spare_slots, ...]; totals: its W
gradients [homes, ...], in the pools' dtype or in max(float32, dtype). DeepEP's source: sgl-deep-ep-v25 0.1.0rc0.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from isoload import ops
from isoload.checks import capturing
from isoload.transport import Group
from isoload.transport.deep_ep import shared_buffer
from isoload.transport.exchanges import Peers, num_bytes
from isoload.weights.layout import Address, Move, Stacks, Wait, add_back, as_bytes, start_moves
from isoload.wording import not_one_of


@dataclass(eq=False)
class BorrowPlan:
    """Experts that one batch and layer borrows, the same on every rank: from home rows to places in the spare pools."""

    # [P] int32 of the plan: its last spare_slots of every rank hold the borrowed experts
    slot_to_expert: Tensor
    home: Tensor  # [E, 2] int32 rank and weight row of every expert's home slot
    home_rows: Mapping[int, Address]  # the same on the host
    num_ranks: int
    spare_slots: int
    _copy: tuple[Tensor, torch.cuda.Event] | None = field(default=None, init=False)

    @property
    def on_host(self) -> bool:
        return self.slot_to_expert.device.type == "cpu"

    def start_copy(self) -> None:
        """Begin to copy a device's plan to the host; :attr:`moves` does not wait if dispatch has waited since."""
        if self.on_host or self._copy is not None:
            return
        spare = self.spare
        pinned = torch.empty(spare.shape, dtype=spare.dtype, pin_memory=True)
        pinned.copy_(spare, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(spare.device))
        self._copy = pinned, event

    @property
    def has_arrived(self) -> bool:
        return self.on_host or (self._copy is not None and bool(self._copy[1].query()))

    @cached_property
    def moves(self) -> list[Move]:
        """Moves by borrowing rank, then place of its pool. Waits for a plan on a device."""
        self.start_copy()
        spare = self.spare
        if self._copy is not None:
            spare, event = self._copy
            event.synchronize()
        return [
            Move(self.home_rows[expert], Address(rank, place))
            for rank, experts in enumerate(spare.tolist())
            for place, expert in enumerate(experts)
            if expert >= 0
        ]

    @property
    def rows(self) -> int:
        """The smallest number of weight rows that hold every rank's homes, the same on every rank."""
        return 1 + max(address.row for address in self.home_rows.values())

    @property
    def spare(self) -> Tensor:
        """[R, spare_slots] the borrowed experts, -1 = none."""
        per_rank = self.slot_to_expert.view(self.num_ranks, -1)
        return per_rank.narrow(1, per_rank.shape[1] - self.spare_slots, self.spare_slots)


class Backend(ABC):
    """How weights are borrowed, for all layers of a group. All ranks make the same calls in the same order."""

    why = "the ranks read each other's memory"  # the reason for the choice of this backend
    name: ClassVar[str]
    reads_moves: ClassVar[bool] = True  # whether the host needs the plan's moves
    # Whether it reads other ranks' memory, whose shape must be the same on all ranks.
    reads_peers: ClassVar[bool] = False

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        self.group, self.peers = group, peers

    @abstractmethod
    def start(self, stage: str, plan: BorrowPlan, sources: Stacks, pools: Stacks) -> Wait:
        """Begin to copy the experts that owned ranks borrow into their pools; return a function that waits for it."""

    @abstractmethod
    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        """Add the gradients of all places to the totals of their homes, in the order of :func:`layout.add_back`."""

    def meet(self) -> None:  # noqa: B027  # only backends that read peers' memory have a reader to wait for
        """Make later writes of the current stream to home rows wait for peers that read them; all ranks call it."""

    def new_stack(self, like: Tensor, rows: int) -> Tensor:
        """Return [rows, ...] zeros that this backend can read on every rank."""
        return like.new_zeros(rows, *like.shape[1:])

    def new_spare(self, like: Tensor, rows: int) -> Tensor:
        """Return [rows, ...] zeros to which this backend can copy weights."""
        return like.new_zeros(rows, *like.shape[1:])


ALIGNMENT = 32  # bytes; DeepEP moves multiples of it
NEEDS = {
    "lb_prefetch_weights": ("redundant_expert_weights", "expert_weights", "redundancy_mapping"),
    "lb_reduce_grads": ("redundant_expert_grads", "expert_grads", "redundancy_mapping"),
}


class DeepEPBorrow(Backend):
    """Borrowing through DeepEP's EPBuffer over NVLink, without a host wait. Gradients are added in any order, so two
    runs may differ. Pools are in EPBuffer's own region (``borrow_bytes``), allocated in the same order on every rank.
    """

    name = "deep_ep"
    reads_moves = False

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        super().__init__(group, peers)
        self.buffer = shared_buffer(group)
        self._taken = 0
        self._whole: dict[int, Tensor] = {}  # the pools with their padding, by address
        self._sent: dict[tuple[object, ...], Tensor] = {}  # gradients in memory that DeepEP reads, by layout

    def start(self, stage: str, plan: BorrowPlan, sources: Stacks, pools: Stacks) -> Wait:
        padded_stacks = [padded(stack, plan.rows) for stack in sources[0]]
        whole = [self._whole[stack.data_ptr()] for stack in pools[0]]
        event = self.buffer.lb_prefetch_weights(whole, padded_stacks, redundancy_mapping(plan))
        return lambda: event.current_stream_wait()

    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        mapping = redundancy_mapping(plan)
        for w, (grad, total) in enumerate(zip(grads[0], totals[0], strict=True)):
            key, size = (w, grad.shape), grad.shape[1:].numel()
            if key not in self._sent:
                self._sent[key] = self._take(len(grad), size * torch.float32.itemsize).view(torch.float32)
            sent = self._sent[key]
            sent[:, :size] = grad.flatten(1)
            # The same number of rows on every rank, as the mapping counts them.
            sums = sent.new_zeros(plan.rows, sent.shape[1])
            sums[: len(total), :size] = total.flatten(1)
            self.buffer.lb_reduce_grads(sent, sums, mapping).current_stream_wait()
            total.copy_(sums[: len(total), :size].reshape(total.shape))

    def new_spare(self, like: Tensor, rows: int) -> Tensor:
        if like.dtype == torch.float64:
            raise ValueError(
                f"experts must not be float64 for borrow='deep_ep', which adds gradients in float32, got {like.dtype}"
            )
        shape = like.shape[1:]
        whole = self._take(rows, shape.numel() * like.itemsize)
        pool = whole.view(like.dtype)[:, : shape.numel()].view(rows, *shape)
        self._whole[pool.data_ptr()] = whole
        return pool

    def _take(self, rows: int, size: int) -> Tensor:
        """Return [rows, bytes] zeros in the buffer's region, size bytes and padding each."""
        storage: Tensor = self.buffer.runtime.lb_storage
        size += -size % ALIGNMENT
        if self._taken + rows * size > len(storage):
            raise ValueError(
                f"borrow_bytes must be at least {self._taken + rows * size} for these experts and their gradients, "
                f"got {len(storage)}"
            )
        taken = storage.narrow(0, self._taken, rows * size).view(rows, size)
        self._taken += rows * size
        return taken.zero_()


def padded(stack: Tensor, rows: int) -> Tensor:
    """Return [rows, ...], contiguous, as many on every rank; padded if DeepEP does not support the rows' size."""
    if len(stack) < rows:
        stack = torch.cat([stack, stack.new_zeros(rows - len(stack), *stack.shape[1:])])
    stack = stack.narrow(0, 0, rows).contiguous()
    missing = -(stack.shape[1:].numel() * stack.itemsize) % ALIGNMENT
    return F.pad(as_bytes(stack), (0, missing)) if missing else stack


def redundancy_mapping(plan: BorrowPlan) -> Tensor:
    """Return [R, spare_slots] int32: home rank * plan.rows + home row of every spare slot's expert; -1 = none."""
    experts = plan.spare
    home = plan.home[experts.clamp(min=0).long()]
    ids = home.select(-1, 0) * plan.rows + home.select(-1, 1)
    return torch.where(experts >= 0, ids, -1).int().contiguous()


def check_deep_ep(group: Group) -> None:
    buffer: Any = shared_buffer(group)
    if buffer is None:
        raise ValueError("borrow must not be deep_ep without a DeepEPTransport, got 'deep_ep'")
    for method, names in NEEDS.items():
        taken = inspect.signature(getattr(buffer, method, lambda: None)).parameters
        if any(name not in taken for name in names):
            raise ValueError(
                f"borrow must not be deep_ep without {method} of DeepEP 2.5, got a {type(buffer).__name__}"
            )
    if buffer.num_nvlink_ranks != group.topology.num_ranks:
        raise ValueError(
            f"borrow must not be deep_ep where NVLink joins only {buffer.num_nvlink_ranks} of "
            f"{group.topology.num_ranks} ranks, got 'deep_ep'"
        )


log = logging.getLogger("isoload")


class AllToAll(Backend):
    """One uneven all_to_all carries all weights; needs memory for the experts that a rank sends and borrows."""

    name = "all_to_all"

    def start(self, stage: str, plan: BorrowPlan, sources: Stacks, pools: Stacks) -> Wait:
        return start_moves(self.group, stage, plan.moves, sources, pools)

    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        add_back(self.group, stage, plan.moves, grads, totals)


class Pull(Backend):
    """A kernel reads the plan and a table of peers' addresses: the host never waits."""

    name = "pull"
    reads_moves, reads_peers = False, True

    peers: Peers

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        super().__init__(group, peers)
        self._reads = False  # whether any rank has read weights since the last barrier
        self._in_graphs = False  # whether replays of CUDA graphs read weights
        self._side: torch.cuda.Stream | None = None
        self._shown: dict[tuple[object, ...], Stacks] = {}  # gradients that peers can read, by layout
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def start(self, stage: str, plan: BorrowPlan, sources: Stacks, pools: Stacks) -> Wait:
        # The gather of this batch's loads came after the last write of peers' weights and before this read.
        peers = reach_all(self.peers, sources)
        self._reads = True
        self._in_graphs |= capturing(pools[0][0].device)
        self._count(stage, plan, pools)
        return self._on_side_stream(partial(self._copy, plan, peers, pools), pools)

    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        peers = reach_all(self.peers, self._show(grads))
        self.peers.meet()
        table, pools = self._table(peers), (plan.spare_slots, grads[0][0].dtype)
        for rank, sums in zip(self.group.ranks, totals, strict=True):
            ops.borrow_backward(plan.slot_to_expert, plan.home, table, sums, plan.num_ranks, rank, *pools)
        self._count(stage, plan, grads)
        self.peers.meet()
        self._reads = False  # the weights that this rank reads in backward were waited for

    def meet(self) -> None:
        if not (self._reads or self._in_graphs):
            return
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self.peers.meet()
        self._reads = False

    def new_stack(self, like: Tensor, rows: int) -> Tensor:
        return self.peers.new((rows, *like.shape[1:]), like.dtype, like.device)

    def _copy(self, plan: BorrowPlan, peers: Stacks, pools: Stacks) -> None:
        table = self._table(peers)
        for rank, stacks in zip(self.group.ranks, pools, strict=True):
            ops.borrow(plan.slot_to_expert, plan.home, table, stacks, plan.num_ranks, rank)

    def _show(self, grads: Stacks) -> Stacks:
        """Return gradients in memory that peers can read, the same memory at every call."""
        key = tuple((g.shape, g.dtype) for g in grads[0])
        if key not in self._shown:
            self._shown[key] = [[self.new_stack(g, len(g)) for g in rank_grads] for rank_grads in grads]
        for rank_grads, shown in zip(grads, self._shown[key], strict=True):
            for g, place in zip(rank_grads, shown, strict=True):
                place.copy_(g)
        return self._shown[key]

    def _table(self, peers: Stacks) -> Tensor:
        """Return [R, W] addresses, made once, because a copy to a device would make the host wait."""
        key = tuple(stack.data_ptr() for stacks in peers for stack in stacks)
        if key not in self._tables:
            self._tables[key] = ops.addresses(peers)
        return self._tables[key]

    def _on_side_stream(self, copy: Callable[[], None], pools: Stacks) -> Wait:
        if pools[0][0].device.type == "cpu":
            copy()
            return lambda: None
        device = pools[0][0].device
        side = self._side = self._side or torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        done = torch.cuda.Event()
        with torch.cuda.stream(side):
            copy()
            done.record(side)
        # Waits for an event, not for the stream: the next layer's copies may be on it by then.
        return lambda: torch.cuda.current_stream(device).wait_event(done)

    def _count(self, stage: str, plan: BorrowPlan, pools: Stacks) -> None:
        if plan.on_host:
            borrowed = sum(move.target.rank in self.group.ranks for move in plan.moves)
            self.group.traffic.bytes[stage] += borrowed * sum(num_bytes(s[0]) for s in pools[0])


class Copy(Pull):
    """Copy engines read from peers, by the plan's copy on the host: no multiprocessor is used."""

    name = "copy"
    reads_moves = True

    def _copy(self, plan: BorrowPlan, peers: Stacks, pools: Stacks) -> None:
        for rank, stacks in zip(self.group.ranks, pools, strict=True):
            for source, target in (m for m in plan.moves if m.target.rank == rank):
                for stack, peer in zip(stacks, peers[source.rank], strict=True):
                    stack[target.row].copy_(peer[source.row], non_blocking=True)


BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (Pull, Copy, AllToAll, DeepEPBorrow)}


def make_backend(group: Group, name: str | None, device: torch.device, own_memory: bool = True) -> Backend:
    """Return the group's backend of a name; None: ``pull`` if ranks can read each other's memory, else ``all_to_all``.
    own_memory: whether home rows are in memory of new_stack; other processes cannot read that of a Shard.
    """
    if name == "p2p":
        raise ValueError(
            "borrow='p2p' was removed: use all_to_all, or pull where ranks can read each other's memory"
        )
    if name is not None and name not in BACKENDS:
        raise ValueError(not_one_of("borrow", BACKENDS, name))
    if name == "deep_ep":
        check_deep_ep(group)
    peers: Peers | str = f"borrow={name!r} was passed"
    if name in (None, "pull", "copy"):
        owned = own_memory or group.owns_all
        peers = group.peers(device) if owned else "no other process can read the memory of a Shard"
    if name in ("pull", "copy") and isinstance(peers, str):
        raise ValueError(
            "borrow must be all_to_all or deep_ep where ranks cannot read each other's memory, "
            f"got {name!r}: {peers}"
        )
    kind = BACKENDS[name or ("all_to_all" if isinstance(peers, str) else "pull")]

    def make() -> Backend:
        backend = kind(group, None if isinstance(peers, str) else peers)
        if isinstance(peers, str):
            backend.why = peers if name else f"pull cannot be used: {peers}"
        falls_back = kind is AllToAll and name is None and device.type == "cuda"
        log.log(logging.WARNING if falls_back else logging.INFO, "borrow uses %s: %s", kind.name, backend.why)
        return backend

    return group.memo(("backend", kind.name), make)


def reach_all(peers: Peers, stacks: Stacks) -> Stacks:
    by_stack = [peers.reach(list(rank_stacks)) for rank_stacks in zip(*stacks, strict=True)]
    return [list(of_rank) for of_rank in zip(*by_stack, strict=True)]
