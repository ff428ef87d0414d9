"""Launches: the kernels that a forward launches and the memory that it takes, on fake CUDA tensors on any machine."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isoload import kernels
from isoload.weights import compute
from support.host_waits import line_of_isoload

# What runs no kernel: views and empty memory.
NO_KERNEL = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "device", "empty", "empty_like",
    "empty_strided", "expand", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "reshape",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
OF_MANY = {"number_rows": 2, "group_copies": 2, "route_shared": 2}  # kernels of an op, of many copies


def kernels_of(name: str, args: tuple[Any, ...]) -> int:
    """plan_joint runs unusual problems in parts. route deals shared copies, if it has a row of them, of many tokens or
    ranks in a kernel of their own. balance_own of few copies is one kernel; balance_same clears
    the other ranks' loads besides."""
    if name == "plan_joint":
        usual = args[2] <= 64 and args[4] == 1 and args[6] is None and args[7] == args[9] == 0
        return 1 if usual else 6
    if name == "balance_own":
        return 1 if args[0].numel() <= 8192 else 3
    if name == "balance_same":
        return 4
    if name == "route":
        return 2 if args[7] is not None and (len(args[0]) > 32768 or args[6] > 64) else 1
    return OF_MANY.get(name, 1)


class Launches(TorchDispatchMode):
    """A mode, entered inside of HostWaits.

    kernels  a line per kernel, GEMMs and collectives aside: the op, and the line of isoload that calls it
    peak     most bytes at a time of what was made since :meth:`clear`
    """

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.kernels, self.peak = list[str](), 0
        self._held: dict[int, int] = {}

    def counted(self) -> Counter[str]:
        return Counter(line.split(" ")[0] for line in self.kernels)

    def note(self, name: str, times: int = 1) -> None:
        self.kernels += [f"{name} in {line_of_isoload()}"] * times

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        made = [
            x for x in (result if isinstance(result, tuple | list) else [result]) if isinstance(x, Tensor)
        ]
        on_cuda = any(x.is_cuda for x in made or args if isinstance(x, Tensor))
        crosses = name == "_to_copy" and args[0].device != made[0].device  # a copy engine's work
        if on_cuda and name not in NO_KERNEL and not crosses:
            self.note(name, kernels_of(name, args))
        for tensor in made:
            self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if not tensor.is_cuda or (key := storage._cdata) in self._held:
            return
        self._held[key] = storage.nbytes()
        weakref.finalize(storage, self._held.pop, key, None)
        self.peak = max(self.peak, sum(self._held.values()))


@contextmanager
def stand_ins(launches: Launches) -> Iterator[None]:
    """In place of the Triton kernels and grouped GEMMs, which fake tensors cannot run: their results' memory."""

    def kernel(name: str, make: Any) -> Any:
        def run(*args: Any) -> Tensor:
            launches.note(name)
            made: Tensor = make(*args)
            return made

        return run

    def grouped_mm(x: Tensor, weight: Tensor, _ends: Tensor) -> Tensor:
        return x.new_empty(len(x), weight.shape[2])

    permutation, activation, bias = (
        ModuleType(f"isoload.kernels.{n}") for n in ("permutation", "activation", "bias")
    )
    made = {
        permutation: {
            "spread_rows": lambda rows, _position, places, _padded: rows.new_empty(places, rows.shape[1]),
            "sum_rows": lambda parts, _weights, dtype: parts[0][0].new_empty(
                len(parts[0][1]), parts[0][0].shape[1], dtype=dtype
            ),
        },
        activation: {"activate": lambda both, _ends, _clamp: both.new_empty(len(both), both.shape[1] // 2)},
        bias: {"add_bias": lambda *_: None},
    }
    with ExitStack() as stack:
        for module, functions in made.items():
            for name, make in functions.items():
                setattr(module, name, kernel(name, make))
            stack.enter_context(patch.dict(sys.modules, {module.__name__: module}))
            name = module.__name__.rsplit(".", 1)[1]
            stack.enter_context(patch.object(kernels, name, module, create=True))
        stack.enter_context(patch.object(kernels, "fit", lambda *given: all(x.is_cuda for x in given)))
        stack.enter_context(patch.object(compute, "compute_path", lambda *_: "grouped_mm"))
        stack.enter_context(patch.object(compute, "grouped_mm", grouped_mm))
        yield
