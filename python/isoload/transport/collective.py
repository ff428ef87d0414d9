"""One rank per process over torch.distributed: gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from isoload.topology import Topology
from isoload.transport.agreement import raise_other_stage, stage_header
from isoload.transport.exchanges import Owned, PerRank
from isoload.transport.group import Group
from isoload.transport.peers import Peers
from isoload.transport.symmetric import make_symmetric
from isoload.value_checks import values_readable

# the name since torch 2.13, and the one before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def device_of(process_group: dist.ProcessGroup) -> torch.device:
    """Where a process group exchanges: on this process's GPU, if there is one and a backend for it."""
    if torch.cuda.is_available() and "cuda:" in dist.get_backend_config(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    options = getattr(process_group._get_backend(device_of(process_group)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


FIRST_WAIT = timedelta(seconds=10)  # before a process warns that it waits for the others
TRIAL_WAIT = timedelta(seconds=30)  # of a process for the others while they try symmetric memory


def await_all(call: str, limit: timedelta | None = None) -> None:
    """Wait until all processes of the default group have made a call, without a collective that could hang.

    A process that waits longer than FIRST_WAIT warns and names the ranks that are missing.

    Args:
        call: what the processes call, for messages.
        limit: how long to wait. None: the group's timeout.

    Raises:
        RuntimeError: some processes have not made the call within the limit, naming their ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    calls = _calls.setdefault(dist.group.WORLD, Counter())
    limit, number = limit or timeout_of(dist.group.WORLD), calls[call]
    keys = [f"isoload/{call}/{number}/{other}" for other in range(size)]
    store.set(keys[rank], "1")

    def missing() -> str:
        return f"rank {rank} has called {call}, but ranks {[r for r in range(size) if not store.check([keys[r]])]} have"

    try:
        try:
            store.wait(keys, first := min(FIRST_WAIT, limit / 2))
        except RuntimeError:
            warnings.warn(f"{missing()} not yet: call it on all ranks", stacklevel=4)
            store.wait(keys, limit - first)
    except RuntimeError:
        message = f"{missing()} not within {limit.total_seconds():.0f} seconds: call it on all ranks"
        store.delete_key(keys[rank])  # a later call must not count this one
        raise RuntimeError(message) from None
    if number:
        store.delete_key(f"isoload/{call}/{number - 1}/{rank}")  # all processes have left that call
    calls[call] += 1


# For each default group how often all its processes have made a call together.
_calls: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class CollectiveGroup(Group):
    """Owns this process's rank of a process group. All ranks of the group construct it together.

    A peer that dies makes each call fail with a RuntimeError that names the stage: at once where the backend sees the
    connection close, else after the process group's timeout.

    Args:
        topology: R ranks, or the number R, as many as the process group has.
        process_group: None = the default one.

    Raises:
        ValueError: on all ranks alike, if the topology does not fit the process group or differs between the ranks.
    """

    def __init__(self, topology: Topology | int, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        super().__init__(topology, [dist.get_rank(self.process_group)])
        size = dist.get_world_size(self.process_group)
        with self.agreeing("construction") as facts:
            facts["topology"] = self.topology
        if self.topology.num_ranks != size:
            got = self.topology.num_ranks
            raise ValueError(f"topology must have the group's {size} ranks, got {got}")

    @classmethod
    def own(cls, topology: Topology | int, like: dist.ProcessGroup | None = None) -> CollectiveGroup:
        """A group over the processes of another, with a communicator that no other code's collectives share.

        All processes of the default group call it together, as :func:`torch.distributed.new_group` demands. Its timeout
        is the other group's.

        Args:
            topology: R ranks, or the number R, as many as `like` has.
            like: whose processes join; None = all.
        """
        ranks = None if like is None else dist.get_process_group_ranks(like)
        given = dist.group.WORLD if like is None else like
        assert given is not None
        return cls(topology, dist.new_group(ranks, timeout=timeout_of(given)))

    def _gather(self, stage: str, rows: Owned, in_node: bool = False) -> Tensor:
        node, num_ranks = self.join_node() if in_node else None, self.topology.num_ranks
        near = self.topology.node_of(self.ranks[0]) if in_node else range(num_ranks)
        gathered = (rows[0].new_zeros if in_node else rows[0].new_empty)(num_ranks, len(rows[0]))
        with self.named(stage):
            self._meet(stage, rows[0], rows[0].nbytes, node)
            _all_gather(gathered[near.start : near.stop].flatten(), rows[0], group=node or self.process_group)
        return gathered

    def _sum(self, stage: str, rows: Owned) -> Tensor:
        total = rows[0].clone()
        with self.named(stage):
            self._meet(stage, total, total.nbytes)
            dist.all_reduce(total, group=self.process_group)
        return total

    def join_node(self) -> dist.ProcessGroup:
        def make() -> dist.ProcessGroup:
            assert self.process_group is not None
            near = self.topology.node_of(self.ranks[0])
            members = [dist.get_process_group_ranks(self.process_group)[rank] for rank in near]
            # local: ranks outside of this group need not call it
            made = dist.new_group(
                members, timeout=timeout_of(self.process_group), use_local_synchronization=True
            )
            assert isinstance(made, dist.ProcessGroup)
            return made

        return self.memo(("node",), make)

    def _start_gather(self, stage: str, rows: Owned) -> Callable[[], Tensor]:
        gathered = rows[0].new_empty(self.topology.num_ranks * len(rows[0]))
        with self.named(stage):
            self._meet(stage, rows[0], rows[0].nbytes)
            work = _all_gather(gathered, rows[0], group=self.process_group, async_op=True)

        def wait() -> Tensor:
            with self.named(stage):
                work.wait()
            return gathered.view(self.topology.num_ranks, -1)

        return wait

    def _swap(
        self, stage: str, buffers: Owned, sent: PerRank, got: PerRank, begun: bool = False
    ) -> Callable[[], Owned]:
        arrived = buffers[0].new_empty(sum(got[0]), *buffers[0].shape[1:])
        leaving = buffers[0].contiguous()
        with self.named(stage):
            self._meet(stage, buffers[0], buffers[0].element_size() * math.prod(buffers[0].shape[1:]))
            work = dist.all_to_all_single(
                arrived, leaving, got[0], sent[0], group=self.process_group, async_op=begun
            )

        def wait() -> Owned:
            if begun:
                with self.named(stage):
                    work.wait()
                leaving.untyped_storage()  # held until here
            return [arrived]

        return wait

    def _meet(self, stage: str, like: Tensor, size: int, node: dist.ProcessGroup | None = None) -> None:
        """Raises on all ranks (of a node), on CPU, unless all are in this stage with rows as large: gloo would abort.

        On a GPU it would be one more collective and a wait of the host; there only the group's timeout helps.
        """
        if not values_readable(like) or like.device.type != "cpu":
            return
        own = self.memo(("header", stage, size), lambda: stage_header(stage, size))
        met = self.process_group if node is None else node
        headers = own.new_empty(dist.get_world_size(met) * len(own))
        _all_gather(headers, own, group=met)
        headers = headers.view(-1, len(own))
        if not headers.eq(own).all():
            raise_other_stage(headers, 0 if node is None else self.topology.node_of(self.ranks[0]).start)

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self.process_group)
        with self.named(stage):
            if "cpu:" in dist.get_backend_config(self.process_group):
                self._meet(stage, torch.empty(0), 0)
            dist.all_gather_object(gathered, given, group=self.process_group)
        return gathered

    def peers(self, device: torch.device) -> Peers | str:
        """Symmetric memory, where a trial shows that it works, else why not; the same on all ranks."""
        if device.type != "cuda":
            return f"processes cannot read each other's memory on {device.type}"
        return self.memo(("symmetric memory",), lambda: self._try_symmetric(device))

    def _try_symmetric(self, device: torch.device) -> Peers | str:
        assert self.process_group is not None
        timeout = timeout_of(self.process_group)
        limit = min(TRIAL_WAIT, timeout / 2)
        try:
            if dist.get_world_size(self.process_group) < dist.get_world_size():
                # torch counts a process's rendezvous over all groups. After one that only some processes make, the next
                # one of the default group would hang (pytorch #196082).
                with self.agreeing("construction"):
                    await_all("construction of a layer that borrows", limit)
            return make_symmetric(self, self.process_group, device, timeout, limit)
        except Exception as error:  # on all ranks, each with its own
            return "; ".join(dict.fromkeys(self.gather_objects("construction", str(error))))

    @contextmanager
    def named(self, stage: str) -> Iterator[None]:
        """What fails inside says in which stage and on which rank."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {stage} failed on rank {self.ranks[0]}: {error} (most likely another rank failed first; its "
                "own error says why)"
            ) from error
