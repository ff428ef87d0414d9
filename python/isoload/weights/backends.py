"""Back ends that bring borrowed weights to spare places, and their gradients home. One result, whoever does it.

Lists run over the ranks that the process owns. lent: a rank's W weight stacks [rows, ...]; pools: its W spare stacks
[spare_slots, ...]; totals: its W gradients [homes, ...], in the pools' dtype or in max(float32, dtype). Gradients are
added by ascending borrower, then place, and rounded once: the same sum every time and on every back end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from isoload import ops
from isoload.transport.collective import CollectiveGroup
from isoload.transport.group import Group
from isoload.transport.packing import unpack
from isoload.transport.peers import Peers
from isoload.transport.traffic import num_bytes
from isoload.weights.loans import Loan, Loans

Stacks = list[list[Tensor]]
Wait = Callable[[], None]
P2P_LIMIT = 32  # operations of a rank in one batch: NCCL hangs on batches of hundreds


class BackEnd(ABC):
    """How weights are borrowed; one for all layers of a group. All ranks make the same calls in the same order."""

    name: ClassVar[str]
    reads_plan: ClassVar[bool] = True  # whether the host must know who borrows what
    reads_peers: ClassVar[bool] = False  # whether it reads other ranks' memory: of the same shape on all

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        self.group, self.peers = group, peers

    @abstractmethod
    def start(self, stage: str, loans: Loans, lent: Stacks, pools: Stacks) -> Wait:
        """Begins to copy what the owned ranks borrow into their pools; the result waits for it."""

    @abstractmethod
    def give_back(self, stage: str, loans: Loans, grads: Stacks, totals: Stacks) -> None:
        """Adds the gradients of all places to the totals of their homes."""

    def new_stack(self, like: Tensor, rows: int) -> Tensor:
        """[rows, ...] zeros that this back end can lend from."""
        return like.new_zeros(rows, *like.shape[1:])


class AllToAll(BackEnd):
    """One uneven all_to_all carries all weights; it needs memory for what a rank lends and borrows on the way."""

    name = "all_to_all"

    def start(self, stage: str, loans: Loans, lent: Stacks, pools: Stacks) -> Wait:
        parts = [loans.of_rank(rank) for rank in self.group.ranks]
        buffers = [pack_rows(stacks, part.rows) for stacks, part in zip(lent, parts, strict=True)]
        finish = self.group.start_send(stage, buffers, parts)

        def wait() -> None:
            for part, stacks, buffer in zip(parts, pools, finish(), strict=True):
                put_rows(stacks, part.places, buffer)

        return wait

    def give_back(self, stage: str, loans: Loans, grads: Stacks, totals: Stacks) -> None:
        parts = [loans.of_rank(rank) for rank in self.group.ranks]
        buffers = [pack_rows(stacks, part.places) for stacks, part in zip(grads, parts, strict=True)]
        returned = self.group.send_back(stage, buffers, parts)
        for part, stacks, sums, buffer in zip(parts, grads, totals, returned, strict=True):
            add_rows(sums, part.rows, unpack_rows(stacks, buffer))


class PointToPoint(BackEnd):
    """Sends and receives of single experts, in the same small batches on every rank, so that none waits in a circle.

    It needs memory for one such batch on the way, and copies when the weights are waited for.
    """

    name = "p2p"
    group: CollectiveGroup

    def start(self, stage: str, loans: Loans, lent: Stacks, pools: Stacks) -> Wait:
        def wait() -> None:
            for chunk in chunks_of(loans.each, self.group.topology.num_ranks):
                came = self._swap(stage, [(i.lender, i.borrower, i.row) for i in chunk], lent[0], pools[0])
                put_rows(pools[0], [i.place for i in chunk if i.borrower == self._rank], came)

        return wait

    def give_back(self, stage: str, loans: Loans, grads: Stacks, totals: Stacks) -> None:
        for chunk in chunks_of(loans.each, self.group.topology.num_ranks):
            back = self._swap(stage, [(i.borrower, i.lender, i.place) for i in chunk], grads[0], grads[0])
            rows = [i.row for i in chunk if i.lender == self._rank]
            add_rows(totals[0], rows, unpack_rows(grads[0], back))

    @property
    def _rank(self) -> int:
        return self.group.ranks[0]

    def _swap(
        self, stage: str, moves: list[tuple[int, int, int]], source: list[Tensor], like: list[Tensor]
    ) -> Tensor:
        """Moves (from, to, row of source); returns [n, bytes] what came to this rank, in their order."""
        processes = self.group.process_group
        sent = [(to, pack_rows(source, [row])) for origin, to, row in moves if origin == self._rank]
        origins = [origin for origin, to, _ in moves if to == self._rank]
        came = pack_rows(like, []).new_empty(len(origins), sum(num_bytes(s[0]) for s in like))
        self.group.traffic.bytes[stage] += sum(num_bytes(row) for _, row in sent)
        ranks = dist.get_process_group_ranks(processes)
        todo = [dist.P2POp(dist.isend, row, ranks[to], processes) for to, row in sent]
        todo += [
            dist.P2POp(dist.irecv, came[i], ranks[origin], processes) for i, origin in enumerate(origins)
        ]
        with self.group.named(stage):
            for work in dist.batch_isend_irecv(todo) if todo else []:
                work.wait()
        return came


class Pull(BackEnd):
    """A kernel reads the plan and a table of peers' addresses: the host never waits."""

    name = "pull"
    reads_plan, reads_peers = False, True

    peers: Peers

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        super().__init__(group, peers)
        self._side: torch.cuda.Stream | None = None
        self._shown: dict[tuple[object, ...], Stacks] = {}  # gradients where peers can read them, by layout
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def start(self, stage: str, loans: Loans, lent: Stacks, pools: Stacks) -> Wait:
        # The gather of this batch's loads came between the last write of peers' weights and this read.
        peers = reach_all(self.peers, lent)

        def copy() -> None:
            self._copy(loans, peers, pools)

        self._count(stage, loans, pools)
        return self._beside(copy, pools)

    def give_back(self, stage: str, loans: Loans, grads: Stacks, totals: Stacks) -> None:
        shown = self._show(grads)
        peers = reach_all(self.peers, shown)
        self.peers.meet()
        table = self._table(peers)
        for rank, sums in zip(self.group.ranks, totals, strict=True):
            ops.borrow_backward(
                loans.slot_to_expert,
                loans.home,
                table,
                sums,
                loans.num_ranks,
                rank,
                loans.spare_slots,
                grads[0][0].dtype,
            )
        self._count(stage, loans, grads)
        self.peers.meet()

    def new_stack(self, like: Tensor, rows: int) -> Tensor:
        return self.peers.new((rows, *like.shape[1:]), like.dtype, like.device)

    def _copy(self, loans: Loans, peers: Stacks, pools: Stacks) -> None:
        table = self._table(peers)
        for rank, stacks in zip(self.group.ranks, pools, strict=True):
            ops.borrow(loans.slot_to_expert, loans.home, table, stacks, loans.num_ranks, rank)

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

    def _beside(self, copy: Callable[[], None], pools: Stacks) -> Wait:
        """On a device the copies run on a stream of their own, after what has been enqueued so far."""
        if pools[0][0].device.type == "cpu":
            copy()
            return lambda: None
        device = pools[0][0].device
        side = self._side = self._side or torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            copy()
        return lambda: torch.cuda.current_stream(device).wait_stream(side)

    def _count(self, stage: str, loans: Loans, pools: Stacks) -> None:
        """Bytes of what the owned ranks read, where the host knows the plan anyway."""
        if loans.on_host:
            borrowed = sum(loan.borrower in self.group.ranks for loan in loans.each)
            self.group.traffic.bytes[stage] += borrowed * sum(num_bytes(s[0]) for s in pools[0])


class Copy(Pull):
    """Copy engines read from peers, as the plan's copy on the host says: no multiprocessor is used."""

    name = "copy"
    reads_plan = True

    def _copy(self, loans: Loans, peers: Stacks, pools: Stacks) -> None:
        for rank, stacks in zip(self.group.ranks, pools, strict=True):
            for loan in (i for i in loans.each if i.borrower == rank):
                for stack, peer in zip(stacks, peers[loan.lender], strict=True):
                    stack[loan.place].copy_(peer[loan.row], non_blocking=True)


BACK_ENDS: dict[str, type[BackEnd]] = {b.name: b for b in (Pull, Copy, AllToAll, PointToPoint)}


def make_back_end(group: Group, name: str | None, device: torch.device) -> BackEnd:
    """The group's back end of a name; None: ``pull`` where ranks can read each other's memory, else ``all_to_all``.

    Raises:
        ValueError: an unknown name, or one that cannot work here.
    """
    if name is not None and name not in BACK_ENDS:
        raise ValueError(f"borrow must be one of {', '.join(BACK_ENDS)}, got {name!r}")
    if name == "p2p":
        if not isinstance(group, CollectiveGroup):
            raise ValueError("borrow must not be p2p without processes, got 'p2p'")
        if device.type == "cuda" and dist.get_backend(group.process_group) == "gloo":
            raise ValueError("borrow must not be p2p over gloo on a GPU, got 'p2p'")
    peers = group.peers(device) if name in (None, "pull", "copy") else None
    if name in ("pull", "copy") and peers is None:
        raise ValueError(
            f"borrow must be all_to_all or p2p where ranks cannot read each other's memory, got {name!r}"
        )
    kind = BACK_ENDS[name or ("all_to_all" if peers is None else "pull")]
    return group.memo(("back end", kind.name), lambda: kind(group, peers))


def reach_all(peers: Peers, stacks: Stacks) -> Stacks:
    """[R][W] the stacks of every rank, given the owned ones."""
    by_stack = [peers.reach(list(own)) for own in zip(*stacks, strict=True)]
    return [list(of_rank) for of_rank in zip(*by_stack, strict=True)]


def chunks_of(loans: Sequence[Loan], num_ranks: int) -> list[list[Loan]]:
    """The loans in order, cut so that no rank has more than P2P_LIMIT of them in a chunk."""
    chunks: list[list[Loan]] = []
    busy = [P2P_LIMIT] * num_ranks
    for loan in loans:
        if max(busy[loan.lender], busy[loan.borrower]) >= P2P_LIMIT:
            chunks.append([])
            busy = [0] * num_ranks
        busy[loan.lender] += 1
        busy[loan.borrower] += 1
        chunks[-1].append(loan)
    return chunks


def as_bytes(stack: Tensor) -> Tensor:
    """[rows, bytes] uint8, a view of a contiguous stack: copies need not know the dtype."""
    return stack.view(len(stack), stack.shape[1:].numel()).view(torch.uint8)


def pack_rows(stacks: Sequence[Tensor], rows: list[int]) -> Tensor:
    """[n, bytes] the picked rows of all stacks side by side."""
    index = torch.tensor(rows, dtype=torch.int64, device=stacks[0].device)
    return torch.cat([as_bytes(stack.contiguous()).index_select(0, index) for stack in stacks], dim=1)


def put_rows(stacks: Sequence[Tensor], rows: list[int], buffer: Tensor) -> None:
    """What :func:`pack_rows` packed, into other rows."""
    index = torch.tensor(rows, dtype=torch.int64, device=buffer.device)
    widths = [num_bytes(stack[0]) for stack in stacks]
    for stack, part in zip(stacks, buffer.split(widths, dim=1), strict=True):
        as_bytes(stack).index_copy_(0, index, part)


def unpack_rows(like: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """[n, ...] per stack, of the stacks' dtype."""
    parts = unpack(buffer, [(stack.shape[1:].numel(), stack.dtype) for stack in like])
    return [part.view(-1, *stack.shape[1:]) for part, stack in zip(parts, like, strict=True)]


def add_rows(totals: Sequence[Tensor], rows: list[int], parts: Sequence[Tensor]) -> None:
    """Adds parts [n, ...] to the rows of totals, in order, in max(float32, dtype); every row is rounded once."""
    for total, values in zip(totals, parts, strict=True):
        exact = torch.promote_types(total.dtype, torch.float32)
        for row in dict.fromkeys(rows):
            added = total[row].to(exact)
            for i in (i for i, other in enumerate(rows) if other == row):
                added = added + values[i]
            total[row] = added
