"""Exchanges: moves tensors between the ranks that share a layer, and counts rows and bytes."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.topology import Topology, as_topology

CHANNEL = 0  # of the barriers
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Peers:
    """Memory that all ranks of a group read in place. Virtual ranks share a process, so they read any tensor."""

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros that every rank can read, of one shape on all ranks. All ranks call it together."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def reach(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return [R] every rank's tensor, given the owned ranks' tensors from :meth:`new`."""
        return tensors

    def meet(self) -> None:
        """Wait for all ranks on the current stream; virtual ranks do not wait."""


class SymmetricMemory(Peers):
    """Tensors on CUDA devices that other ranks read in place, made by all ranks in the same order. After `timeout` a
    barrier kills the CUDA context. Memory of :meth:`new` is freed with the tensor that it returned. Several ranks on
    one device need OVERLAP=1. `masked`: GPUs share a device index, so that torch treats them as one GPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, masked: bool = False
    ) -> None:
        self._group, self._device, self._masked = group, device, masked
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        # Key: address of the rank's own part. Value: torch's handle, and views of all parts by shape and dtype.
        self._shared: dict[int, tuple[Any, dict[tuple[object, ...], list[Tensor]]]] = {}
        self.pad = self.new((2,), torch.int64, device)  # its handle has the signals of the barriers
        self._met: torch.cuda.Event | None = None

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not from torch's pool: the tensor's offset there, and whether its block needs a rendezvous, depend on memory
        # that this process freed earlier, which can differ between ranks.
        strides = torch.empty(shape, device="meta").stride()
        tensor = _SymmetricMemory.empty_strided_p2p(tuple(shape), strides, dtype, device)
        if self._masked:
            os.environ[OVERLAP] = "1"
        try:
            handle = symmetric.rendezvous(tensor, self._group)
        finally:
            if self._masked:
                del os.environ[OVERLAP]
        self._shared[tensor.data_ptr()] = handle, {}
        weakref.finalize(tensor, self._shared.pop, tensor.data_ptr()).atexit = False
        return tensor.zero_()

    def reach(self, tensors: list[Tensor]) -> list[Tensor]:
        (mine,) = tensors
        if mine.data_ptr() not in self._shared:
            # Not made by new(), as after .to() or a copy.
            raise ValueError(
                "weights must stay in the memory they were made in, since other ranks read it, got a tensor elsewhere"
            )
        handle, views = self._shared[mine.data_ptr()]
        key = mine.shape, mine.dtype
        if key not in views:
            ranks = range(dist.get_world_size(self._group))
            views[key] = [handle.get_buffer(rank, mine.shape, mine.dtype) for rank in ranks]
        return views[key]

    def meet(self) -> None:
        # On two streams, barriers of different layers could pair. An external event also orders replays of graphs.
        stream = torch.cuda.current_stream(self._device)
        if self._met is None:
            self._met = torch.cuda.Event(external=True)
        stream.wait_event(self._met)
        self._shared[self.pad.data_ptr()][0].barrier(channel=CHANNEL, timeout_ms=self._timeout_ms)
        self._met.record(stream)


T = TypeVar("T")
Own = TypeVar("Own", bound="Shared")
Owned = list[Tensor]  # of every rank that this process owns
PerRank = list[list[int]]  # for every owned rank [R], by destination or by source


class Shared:
    """Part of a layer's transport, which connects processes: copying a layer does not copy it."""

    def __deepcopy__(self: Own, memo: dict[int, Any]) -> Own:
        return self


@dataclass
class Traffic:
    """Rows and bytes that this process passed to the exchanges since the group was made."""

    # [R, R] int64 rows dispatched, source x destination; only own sources are filled, DeepEP's rows are not counted.
    rows: Tensor
    # By stage, with padding and bytes that a rank sends to itself, without the frames that processes on CPU compare.
    bytes: Counter[str] = field(default_factory=Counter)
    host_syncs: int = 0  # how often the host waited for received values

    @classmethod
    def of(cls, num_ranks: int, device: torch.device) -> Traffic:
        with torch.inference_mode(False):  # otherwise only inference mode could add to it
            return cls(torch.zeros(num_ranks, num_ranks, dtype=torch.int64, device=device))

    def move_to(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.rows = self.rows.to(device)


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; unlike ``nbytes`` also while torch.compile traces symbolic sizes."""
    return tensor.numel() * tensor.itemsize


@dataclass(frozen=True, eq=False)
class SendCounts:
    """Numbers of rows that a rank sends to every destination and gets from every source, [R] each, padding included."""

    sent: list[int]
    got: list[int]


class Exchanges(Shared, ABC):
    """R ranks that exchange tensors; lists are indexed by ``ranks``, those that this process owns. Every rank makes the
    same calls in the same order. Each exchange has a stage, which names it in errors and in ``traffic.bytes``.
    """

    def __init__(self, topology: Topology | int, ranks: Sequence[int]) -> None:
        self.topology = as_topology(topology)
        self.ranks = tuple(ranks)
        self.traffic = Traffic.of(self.topology.num_ranks, torch.device("cpu"))
        self._memo: dict[tuple[Any, ...], Any] = {}

    def __reduce__(self) -> Any:
        raise TypeError(
            "a layer over processes cannot be pickled (torch.save): call isoload.save(model, optimizer, folder) on all "
            "ranks, or save its state_dict() on every rank, and load that into a new layer"
        )

    @property
    def owns_all(self) -> bool:
        return len(self.ranks) == self.topology.num_ranks

    @abstractmethod
    def _gather(self, stage: str, rows: Owned, in_node: bool = False) -> Tensor:
        """Return [R, F], the row [F] of every rank. in_node: only ranks of the owned ranks' nodes, 0 for other rows."""

    @abstractmethod
    def _swap(
        self, stage: str, buffers: Owned, sent: PerRank, got: PerRank, begun: bool = False
    ) -> Callable[[], Owned]:
        """Start a swap and return a function that waits for it. begun: other exchanges may come before the wait."""

    @abstractmethod
    def gather_objects(self, stage: str, value: object) -> list[Any]:
        """Return the object of every process of the group. Slow: uses pickle."""

    def _start_gather(self, stage: str, rows: Owned) -> Callable[[], Tensor]:
        gathered = self._gather(stage, rows)
        return lambda: gathered

    def join_node(self) -> object:
        """Prepare gathers inside nodes, once. All ranks call it together."""
        return None

    def gather(self, stage: str, rows: Owned) -> Tensor:
        """Return [R, F]: the row [F] of every rank, the same on all ranks."""
        self.traffic.bytes[stage] += sum(map(num_bytes, rows))
        return self._gather(stage, rows)

    def start_gather(self, stage: str, rows: Owned) -> Callable[[], Tensor]:
        """Begin :meth:`gather` and return a function that waits for the rows; other exchanges may come before that."""
        self.traffic.bytes[stage] += sum(map(num_bytes, rows))
        return self._start_gather(stage, rows)

    def send(self, stage: str, buffers: Owned, counts: Sequence[SendCounts]) -> Owned:
        """Exchange rows (all-to-all): [sum(sent), F] by destination -> [sum(got), F] by source."""
        return self.swap(stage, buffers, [c.sent for c in counts], [c.got for c in counts])()

    def start_send(self, stage: str, buffers: Owned, counts: Sequence[SendCounts]) -> Callable[[], Owned]:
        return self.swap(stage, buffers, [c.sent for c in counts], [c.got for c in counts], True)

    def send_back(self, stage: str, buffers: Owned, counts: Sequence[SendCounts]) -> Owned:
        """Exchange in the opposite direction: buffers [sum(got), F] -> [sum(sent), F]."""
        return self.swap(stage, buffers, [c.got for c in counts], [c.sent for c in counts])()

    def swap(
        self, stage: str, buffers: Owned, sent: PerRank, got: PerRank, begun: bool = False
    ) -> Callable[[], Owned]:
        self.traffic.bytes[stage] += sum(map(num_bytes, buffers))
        return self._swap(stage, buffers, sent, got, begun)

    def peers(self, device: torch.device) -> Peers | str:
        """Return the other ranks' memory on a device, or why kernels cannot read it. All ranks call it together."""
        return f"a {type(self).__name__} has no memory that all ranks read"

    def memo(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return make(), computed once per key and shared by all layers of the group."""
        if key not in self._memo:
            self._memo[key] = make()
        value: T = self._memo[key]
        return value

    def reset_traffic(self) -> None:
        """Reset all counts to zero. The row counts stay on their device: moving them would make the host wait."""
        self.traffic = Traffic.of(self.topology.num_ranks, self.traffic.rows.device)

    def check_owned(self, name: str, entries: Sequence[object]) -> None:
        if len(entries) != len(self.ranks):
            raise ValueError(
                f"{name} must have one entry per owned rank ({len(self.ranks)}), got {len(entries)}"
            )
