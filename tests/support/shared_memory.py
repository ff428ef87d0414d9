"""torch's symmetric memory for processes on CPU: files that all map, and what a cluster does wrong on request."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch._C import _distributed_c10d

from isoload.transport import CollectiveGroup
from isoload.transport import collective as trials
from isoload.transport.exchanges import OVERLAP

CPU = torch.device("cpu")


class Handle:
    """What a rendezvous returns: every rank's file, mapped on demand."""

    def __init__(self, double: SharedMemory, paths: list[str], size: int) -> None:
        self.double, self.paths, self.size = double, paths, size
        double.live += 1

    def __del__(self) -> None:
        self.double.live -= 1

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        return map_file(self.paths[rank], self.size)[:nbytes].view(dtype).view(*shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.double.barriers.append((channel, timeout_ms))
        self.double.meeting()
        dist.barrier(self.double.group)


def map_file(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class SharedMemory:
    """The double of one process.

    Args:
        peer: the rank whose memory a rank reads in place of another's; None: the other's own.
        fail: raises where this rank's rendezvous fails.
        number: the device index of this rank's GPU in its process.

    Attributes:
        live: handles that have not been freed.
        meetings: rendezvous so far.
        barriers: channel and timeout in milliseconds of every barrier.
        meeting: called in every barrier.
    """

    def __init__(
        self,
        folder: str,
        peer: Callable[[int], int] | None = None,
        fail: Callable[[], None] | None = None,
        number: int = 0,
    ) -> None:
        self.folder, self.peer, self.fail = folder, peer, fail
        self.live = self.meetings = 0
        self.barriers: list[tuple[int, int]] = []
        self.meeting: Callable[[], None] = lambda: None
        self.group: dist.ProcessGroup | None = None
        self._files: dict[int, tuple[str, int]] = {}
        self._names = count()
        self.number = number

    def empty_strided_p2p(self, shape: Any, _strides: Any, dtype: torch.dtype, _device: Any) -> Tensor:
        size = max(prod(shape) * dtype.itemsize, 1)
        path = f"{self.folder}/{os.getpid()}-{next(self._names)}"
        Path(path).write_bytes(b"\7" * size)
        tensor = map_file(path, size)[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)
        self._files[tensor.data_ptr()] = path, size
        return tensor

    def rendezvous(self, tensor: Tensor, group: dist.ProcessGroup) -> Handle:
        """As torch's: numbered by what this process has met for, waiting for the group's store."""
        self.group, rank, size = group, dist.get_rank(group), dist.get_world_size(group)
        store = dist.distributed_c10d._get_process_group_store(group)
        path, nbytes = self._files[tensor.data_ptr()]
        self.meetings += 1
        store.set(f"symmetric/{self.meetings}/{rank}", f"{path} {socket.gethostname()}/{self.number}")
        if self.fail is not None:
            self.fail()
        gathered = [store.get(f"symmetric/{self.meetings}/{other}").decode().split() for other in range(size)]
        if len({number for _, number in gathered}) < size and os.environ.get(OVERLAP) != "1":
            raise RuntimeError("detected allocations from overlapping devices from different ranks.")
        store.set(f"symmetric/{self.meetings}/{rank}/mapped", "")
        store.wait([f"symmetric/{self.meetings}/{other}/mapped" for other in range(size)])
        paths = [gathered[other if self.peer is None else self.peer(other)][0] for other in range(size)]
        return Handle(self, paths, nbytes)


class Stream:
    """A stream that notes the events it waits for."""

    def __init__(self, name: str = "main") -> None:
        self.name, self.waited = name, list[Any]()

    def wait_event(self, event: Any) -> None:
        self.waited.append(event.recorded)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)


class Event:
    """An event that knows the stream that recorded it last."""

    recorded: str | None = None

    def __init__(self, external: bool = False) -> None: ...

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name


@contextmanager
def shared_memory(
    host: str = "host", fabric: str | None = None, gpu: str | None = None, **how: Any
) -> Iterator[SharedMemory]:
    """Run with a GPU of this UUID (None: one of the rank's own) on a host in a fabric domain; all GPUs have index 0."""
    uuid = f"GPU {dist.get_rank()}" if gpu is None else gpu
    with tempfile.TemporaryDirectory() as folder:
        double, stream = SharedMemory(folder, **how), Stream()
        with (
            patch.object(symmetric, "rendezvous", double.rendezvous),
            patch.object(
                _distributed_c10d,
                "_SymmetricMemory",
                SimpleNamespace(empty_strided_p2p=double.empty_strided_p2p),
            ),
            patch.object(trials, "gpu_of", lambda _device: uuid),
            patch.object(trials, "fabric_of", lambda _gpu: fabric),
            patch.object(trials.socket, "gethostname", lambda: host),
            patch.object(torch.cuda, "current_stream", lambda _device=None: stream),
            patch.object(torch.cuda, "Event", Event),
            patch.object(CollectiveGroup, "peers", peers_on_cpu),
        ):
            yield double


def peers_on_cpu(group: CollectiveGroup, device: torch.device) -> Any:
    return group.memo(("symmetric memory",), lambda: group._try_symmetric(device))
