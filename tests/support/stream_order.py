"""StreamOrder: on which stream every kernel is enqueued, and what uses memory that another stream has not left yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.host_waits import HostWaits, Stream, line_of_isoload
from support.launches import NO_KERNEL


@dataclass(eq=False)
class Kernel:
    """A kernel: the op, the line of isoload that calls it, its stream, its number there, what comes before it."""

    name: str
    line: str
    stream: Stream
    step: int
    behind: dict[Stream, int]

    def comes_behind(self, other: Kernel) -> bool:
        return self.behind.get(other.stream, 0) >= other.step


@dataclass(eq=False)
class Memory:
    """A storage: whose allocator it is of, its last write, as far as it was seen, the reads since, and the streams for
    which the allocator keeps it."""

    stream: Stream
    write: Kernel | None
    reads: list[Kernel] = field(default_factory=list)
    kept: set[Stream] = field(default_factory=set)


class StreamOrder(TorchDispatchMode):
    """A mode, entered inside of HostWaits.

    kernels  as they are enqueued
    races    a line per kernel that no event orders behind one whose result it reads, whose input or result it writes,
             or whose memory, free for the host, its stream's allocator gives out again
    """

    def __init__(self, host: HostWaits) -> None:
        super().__init__()
        self.host, self.kernels, self.races = host, list[Kernel](), list[str]()
        self._known: dict[int, Memory] = {}
        self._freed: list[Memory] = []
        host.kept = lambda tensor, stream: self._of(tensor).kept.add(stream)
        host.copied = lambda target, source: self._note("copy_", [source], [target], [])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_cuda]
        given = zip(func._schema.arguments, args, strict=False)
        written = [v for spec, v in given if spec.alias_info is not None and spec.alias_info.is_write]
        read = [] if name in NO_KERNEL else list(on_cuda((args, kwargs)))
        if name not in NO_KERNEL or any(t.untyped_storage()._cdata not in self._known for t in made):
            self._note(name, read, list(on_cuda(written)), made)
        return result

    def _note(self, name: str, read: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        if not (read or written or made):
            return
        stream = self.host.stream
        kernel = Kernel(name, line_of_isoload(), stream, stream.step(), dict(stream.clock))
        self.kernels.append(kernel)
        for tensor in made:
            if tensor.untyped_storage()._cdata not in self._known:
                self._allocate(tensor, kernel)
        for tensor in read:
            memory = self._of(tensor)
            self._check(kernel, [memory.write], "read")
            memory.reads.append(kernel)
        for tensor in written:
            memory = self._of(tensor)
            self._check(kernel, [memory.write, *memory.reads], "write")
            memory.write, memory.reads = kernel, []

    def _allocate(self, tensor: Tensor, kernel: Kernel) -> None:
        for memory in [old for old in self._freed if old.stream is kernel.stream]:
            uses = [use for use in (memory.write, *memory.reads) if use and use.stream not in memory.kept]
            self._check(kernel, uses, "allocate")
            self._freed.remove(memory)
        self._of(tensor).write = kernel

    def _of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = Memory(self.host.stream, None)
            weakref.finalize(storage, self._free, key)
        return self._known[key]

    def _free(self, key: int) -> None:
        self._freed.append(self._known.pop(key))

    def _check(self, kernel: Kernel, before: Sequence[Kernel | None], what: str) -> None:
        for other in before:
            if other is not None and other is not kernel and not kernel.comes_behind(other):
                self.races.append(f"{what} of {kernel.name} in {kernel.line}, {other.name} in {other.line}")


def on_cuda(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_cuda)
