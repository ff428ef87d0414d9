"""Shared memory: tensors of processes on one machine that all of them read and write."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from isoload.transport.group import Group
from isoload.transport.peers import Peers

FOLDER = "/dev/shm"  # in memory, where there is one
STAGE = "shared memory"


class SharedMemory(Peers):
    """The shared tensors of a group of one rank per process, on CPU. All ranks make them in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._views: dict[int, list[Tensor]] = {}  # [R] by the address of the rank's own

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros of one shape on every rank.

        Raises:
            ValueError: on all ranks, where one has no room, or cannot open another's memory: it is on another machine.
        """
        with ExitStack() as until_opened:
            with self._group.agreeing(STAGE):
                path = until_opened.enter_context(_reserved(math.prod(shape) * dtype.itemsize))
            paths = self._group.gather_objects(STAGE, path)
            with self._group.agreeing(STAGE):  # nobody's name goes before all have opened it
                views = [_open(rank, path, shape, dtype) for rank, path in enumerate(paths)]
        own = views[self._group.ranks[0]]
        self._views[own.data_ptr()] = views
        return own

    def reach(self, own: list[Tensor]) -> list[Tensor]:
        """[R] every rank's tensor, given this rank's from :meth:`new`."""
        return self._views[own[0].data_ptr()]

    def meet(self) -> None:
        """A barrier, for which the host waits."""
        self._group.gather_objects(STAGE, None)


@contextmanager
def _reserved(size: int) -> Iterator[str]:
    """The name of a file of zeros that are there: the first touch of one that is not would be SIGBUS."""
    folder = FOLDER if os.path.isdir(FOLDER) else tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(prefix="isoload-", dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise ValueError(f"{folder} must have {size} bytes free, got: {error.strerror}") from None
        yield file.name


def _open(rank: int, path: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not Path(path).exists():  # torch would make it
        raise ValueError(f"memory of rank {rank} must be on this machine, got no {path} here")
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(*shape)
