"""A CUDA graph's double on a CPU: the calls that reach torch's dispatcher, recorded, then run again in place.

As with a graph, a capture runs nothing: what was there before stays, what it makes has no value yet. Replays read and
write the memory that the capture did. Python runs no more, so what it read or counted in the capture stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoload.transport import group

SPOILT = 85


def tensors_in(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedCalls(TorchDispatchMode):
    """calls: in order, with their results, which are held, so that nothing else gets their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: dict[int, Tensor] = {}  # by memory
        self._written: list[
            tuple[Tensor, Tensor]
        ] = []  # what was there before and is written, and a copy of it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for argument, value in self._arguments(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written += [(t, t.clone()) for t in tensors_in(value) if memory(t) not in self._made]
        result = func(*args, **kwargs)
        given = {memory(t) for t in tensors_in((args, kwargs))}
        self._made.update((memory(t), t) for t in tensors_in(result) if memory(t) not in given)
        self.calls.append((func, args, kwargs, tensors_in(result)))
        return result

    @staticmethod
    def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        for place, argument in enumerate(func._schema.arguments):
            if place < len(args) or argument.name in kwargs:
                yield argument, args[place] if place < len(args) else kwargs[argument.name]

    def undo(self) -> None:
        for tensor, before in reversed(self._written):
            tensor.copy_(before)
        for tensor in self._made.values():
            tensor.fill_(SPOILT)

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            for tensor, again in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                if memory(tensor) != memory(again):
                    tensor.copy_(again)


@contextmanager
def as_if_capturing() -> Iterator[None]:
    with patch.object(group, "capturing", lambda _device: True):
        yield


def recorded(call: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """In the place of isoload.balancing.captured.cuda_graph."""
    calls = RecordedCalls()
    with as_if_capturing(), calls:
        result = call()
    calls.undo()
    return calls.replay, result
