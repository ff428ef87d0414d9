"""HostWaits: counts where the host would wait for a GPU, on fake CUDA tensors and on any machine.

Modes see what reaches torch: copies between the host's pageable memory and the device, reads of values, indices from
the host, masks. What a fake tensor has no values for, `.tolist()`, is counted where it is called; the test answers it.
On torch's CPU build fake CUDA tensors cannot be indexed or made by `new_tensor`: the mode does that in their stead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero"}
Answer = Callable[[Tensor], list[Any]]


def line_of_isoload() -> str:
    """file.py:line of the innermost frame that runs a module of isoload, wherever its files lie; else "the test"."""
    frame = sys._getframe(1)
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").partition(".")
        if package == "isoload":
            return f"{module.replace('.', '/')}.py:{frame.f_lineno}"
        frame = frame.f_back
    return "the test"


class HostWaits:
    """A context: fake tensors, and what the host waits for on those on CUDA.

    waits   a line per wait: its kind, and the line of isoload that does it
    answer  gives what `.tolist()` of a fake tensor returns
    """

    def __init__(self, answer: Answer) -> None:
        self.answer, self.waits = answer, list[str]()
        self.stream = self.main = Stream(self)  # the current one
        self.copied: Callable[[Tensor, Tensor], None] = lambda _target, _source: (
            None
        )  # called in place of a copy
        self.kept: Callable[[Tensor, Stream], None] = lambda _tensor, _stream: None  # of Tensor.record_stream
        self.pinned: list[Tensor] = []  # held, so that no other tensor takes their identity

    def __enter__(self) -> HostWaits:
        self._stack = ExitStack()
        for context in (
            FakeTensorMode(allow_non_fake_inputs=True),
            _Functions(self),
            _Dispatched(self),
            patch.object(FakeTensor, "tolist", lambda tensor: self._read(tensor)),
            patch.object(FakeTensor, "record_stream", lambda tensor, stream: self.kept(tensor, stream)),
            patch.object(FakeTensor, "data_ptr", lambda tensor: id(tensor), create=True),
            patch.multiple(
                torch.cuda,
                Event=lambda: _Event(self),
                Stream=lambda _device=None: Stream(self),
                current_stream=lambda _device=None: self.stream,
                stream=lambda stream: stream,
                get_device_capability=lambda _device: (9, 0),
            ),
        ):
            self._stack.enter_context(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def note(self, kind: str) -> None:
        self.waits.append(f"{kind} in {line_of_isoload()}")

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self.pinned)

    def note_copy(self, source: Tensor, target: torch.device, non_blocking: bool) -> None:
        """A copy between the host and the device waits unless its host memory is pinned and nobody wants it now."""
        crosses = {source.device.type, target.type} == {"cpu", "cuda"} and source.numel()
        pageable = source.device.type == "cpu" and not self.is_pinned(source)
        if crosses and (pageable or not non_blocking):
            self.note(f"copy {source.device.type} to {target.type}")

    def _read(self, tensor: Tensor) -> list[Any]:
        if tensor.is_cuda and tensor.numel():
            self.note("tolist")
        return self.answer(tensor)


class _Dispatched(TorchDispatchMode):
    """What reaches the dispatcher."""

    def __init__(self, of: HostWaits) -> None:
        super().__init__()
        self.of = of

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):  # two thirds of all calls
            return args[0].fake_device
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in READS and args[0].is_cuda:
            self.of.note(name)
        elif name == "_to_copy":
            target = kwargs.get("device") or args[0].device
            self.of.note_copy(args[0], target, kwargs.get("non_blocking", False))
        elif name in ("index", "index_put", "index_put_") and args[0].is_cuda:
            for index in (i for i in args[1] if i is not None):
                if index.dtype == torch.bool:
                    self.of.note("mask as index")
                elif not index.is_cuda and index.numel():
                    self.of.note("index from the host")
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self.of.pinned.append(result)
        return result


class _Functions(TorchFunctionMode):
    """Calls that never reach the dispatcher on a machine without CUDA, done by others that do."""

    def __init__(self, of: HostWaits) -> None:
        super().__init__()
        self.of = of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "tensor" and kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            self.of.pinned.append(made)
            return made
        on_cuda = bool(args) and isinstance(args[0], FakeTensor) and args[0].fake_device.type == "cuda"
        if on_cuda and name in READS:
            self.of.note(name)
            raise RuntimeError(f"fake data cannot be read: {name}")
        if on_cuda and name == "new_tensor":
            values = torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype))
            return values.to(args[0].device)
        if on_cuda and name == "__getitem__":
            return pick(args[0], args[1])
        if on_cuda and name == "__setitem__":
            part, value = pick(args[0], args[1]), args[2]
            return self._copy(part, value) if isinstance(value, Tensor) else part.fill_(value)
        if name == "copy_" and any(a.is_cuda for a in args[:2]):
            return self._copy(args[0], args[1], *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """What is in fake memory is the same before and after."""
        to_pinned = self.of.is_pinned(target) and non_blocking
        if not to_pinned:
            self.of.note_copy(source, target.device, non_blocking)
        self.of.copied(target, source)
        return target


def pick(tensor: Tensor, key: Any) -> Tensor:
    """`tensor[key]` for ints, slices, None, lists and tensors."""
    indices: list[Tensor | None] = []
    for part in key if isinstance(key, tuple) else (key,):
        dim = len(indices)
        if part is None:
            tensor = tensor.unsqueeze(dim)
            indices.append(None)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
        elif isinstance(part, slice):
            tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            indices.append(None)
        else:
            indices.append(torch.tensor(part) if isinstance(part, Sequence) else part)
    return tensor if all(i is None for i in indices) else aten.index.Tensor(tensor, indices)


class Stream:
    """Fake tensors are never computed: a stream notes what it has come behind.

    clock   per stream how many of its steps come before whatever is enqueued here next
    """

    def __init__(self, of: HostWaits) -> None:
        self.of, self.clock = of, dict[Stream, int]()

    def step(self) -> int:
        """One more kernel is enqueued; its number."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def wait_stream(self, other: Stream) -> None:
        self._come_behind(other.clock)

    def wait_event(self, event: _Event) -> None:
        self._come_behind(event.clock)

    def _come_behind(self, clock: dict[Stream, int]) -> None:
        for stream, steps in clock.items():
            self.clock[stream] = max(steps, self.clock.get(stream, 0))

    def __enter__(self) -> None:
        self._outer, self.of.stream = self.of.stream, self

    def __exit__(self, *_error: object) -> None:
        self.of.stream = self._outer


class _Event:
    """Reached once the host has waited for anything that came after it."""

    def __init__(self, of: HostWaits) -> None:
        self.of, self.clock = of, dict[Stream, int]()

    def record(self, stream: Stream | None = None) -> None:
        self.before, self.clock = len(self.of.waits), dict((stream or self.of.stream).clock)

    def query(self) -> bool:
        return len(self.of.waits) > self.before

    def synchronize(self) -> None:
        if not self.query():
            self.of.note("event")
