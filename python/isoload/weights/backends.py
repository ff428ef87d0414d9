"""The backends and the choice among them: see isoload.weights.backend."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from isoload import ops
from isoload.transport import Group
from isoload.transport.exchanges import num_bytes
from isoload.transport.peers import Peers
from isoload.value_checks import capturing
from isoload.weights.backend import Backend, BorrowPlan
from isoload.weights.deep_ep import DeepEPBorrow, check_deep_ep
from isoload.weights.moves import Stacks, Wait, add_back, start_moves
from isoload.wording import not_one_of

log = logging.getLogger("isoload")


class AllToAll(Backend):
    """One uneven all_to_all carries all weights; it needs memory for what a rank sends and borrows on the way."""

    name = "all_to_all"

    def start(self, stage: str, plan: BorrowPlan, held: Stacks, pools: Stacks) -> Wait:
        return start_moves(self.group, stage, plan.moves, held, pools)

    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        add_back(self.group, stage, plan.moves, grads, totals)


class Pull(Backend):
    """A kernel reads the plan and a table of peers' addresses: the host never waits."""

    name = "pull"
    reads_moves, reads_peers = False, True

    peers: Peers

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        super().__init__(group, peers)
        self._reads = False  # whether any rank has read weights since the ranks last met
        self._in_graphs = False  # whether replays of CUDA graphs read weights
        self._side: torch.cuda.Stream | None = None
        self._shown: dict[tuple[object, ...], Stacks] = {}  # gradients where peers can read them, by layout
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def start(self, stage: str, plan: BorrowPlan, held: Stacks, pools: Stacks) -> Wait:
        # The gather of this batch's loads came between the last write of peers' weights and this read.
        peers = reach_all(self.peers, held)
        self._reads = True
        self._in_graphs |= capturing(pools[0][0].device)

        def copy() -> None:
            self._copy(plan, peers, pools)

        self._count(stage, plan, pools)
        return self._on_side_stream(copy, pools)

    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        shown = self._show(grads)
        peers = reach_all(self.peers, shown)
        self.peers.meet()
        table = self._table(peers)
        for rank, sums in zip(self.group.ranks, totals, strict=True):
            ops.borrow_backward(
                plan.slot_to_expert,
                plan.home,
                table,
                sums,
                plan.num_ranks,
                rank,
                plan.spare_slots,
                grads[0][0].dtype,
            )
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
        """Gradients in memory that peers can read, the same every time."""
        key = tuple((g.shape, g.dtype) for g in grads[0])
        if key not in self._shown:
            self._shown[key] = [[self.new_stack(g, len(g)) for g in own] for own in grads]
        for own, shown in zip(grads, self._shown[key], strict=True):
            for g, place in zip(own, shown, strict=True):
                place.copy_(g)
        return self._shown[key]

    def _table(self, peers: Stacks) -> Tensor:
        """[R, W] addresses, made once: a copy to a device would make the host wait. The kernels never write there."""
        key = tuple(stack.data_ptr() for stacks in peers for stack in stacks)
        if key not in self._tables:
            self._tables[key] = ops.addresses(peers)
        return self._tables[key]

    def _on_side_stream(self, copy: Callable[[], None], pools: Stacks) -> Wait:
        """On a device the copies run on a stream of their own, after what has been enqueued so far."""
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
        # not for the stream: the next layer's copies may be on it by then
        return lambda: torch.cuda.current_stream(device).wait_event(done)

    def _count(self, stage: str, plan: BorrowPlan, pools: Stacks) -> None:
        """Bytes of what the owned ranks read, where the plan lies on the host anyway."""
        if plan.on_host:
            borrowed = sum(move.target.rank in self.group.ranks for move in plan.moves)
            self.group.traffic.bytes[stage] += borrowed * sum(num_bytes(s[0]) for s in pools[0])


class Copy(Pull):
    """Copy engines read from peers, as the plan's copy on the host says: no multiprocessor is used."""

    name = "copy"
    reads_moves = True

    def _copy(self, plan: BorrowPlan, peers: Stacks, pools: Stacks) -> None:
        for rank, stacks in zip(self.group.ranks, pools, strict=True):
            for source, target in (m for m in plan.moves if m.target.rank == rank):
                for stack, peer in zip(stacks, peers[source.rank], strict=True):
                    stack[target.row].copy_(peer[source.row], non_blocking=True)


BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (Pull, Copy, AllToAll, DeepEPBorrow)}


def make_backend(group: Group, name: str | None, device: torch.device, own_memory: bool = True) -> Backend:
    """The group's backend of a name; None: ``pull`` where ranks can read each other's memory, else ``all_to_all``.

    Args:
        name: in BACKENDS, or None.
        device: of the weights.
        own_memory: whether home rows lie in memory of new_stack; that of a Shard no other process can read.
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
        made = kind(group, None if isinstance(peers, str) else peers)
        if isinstance(peers, str):
            made.why = peers if name else f"pull cannot be used: {peers}"
        falls_back = kind is AllToAll and name is None and device.type == "cuda"
        log.log(logging.WARNING if falls_back else logging.INFO, "borrow uses %s: %s", kind.name, made.why)
        return made

    return group.memo(("backend", kind.name), make)


def reach_all(peers: Peers, stacks: Stacks) -> Stacks:
    """[R][W] the stacks of every rank, given the owned ones."""
    by_stack = [peers.reach(list(own)) for own in zip(*stacks, strict=True)]
    return [list(of_rank) for of_rank in zip(*by_stack, strict=True)]
