"""The compiled library: its ops, its C functions and the errors of both (csrc/ops/list.h)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


if not (_paths := sorted(Path(__file__).parents[1].glob("_C*.so"))):
    raise ImportError("isoload's compiled ops are missing: run `make build` (or reinstall isoload)")
torch.ops.load_library(str(_paths[0]))
LIBRARY = ctypes.CDLL(str(_paths[0]))  # for its C functions
LIBRARY.isoload_fault_rules.restype = ctypes.c_char_p
RULES = tuple(LIBRARY.isoload_fault_rules().decode().splitlines())  # one per bit of a device's error word
library = torch.ops.isoload


def op(name: str) -> Callable[[Callable[[Any], T]], Callable[..., T]]:
    """Replace a function by the op of a name: it maps the arguments to results that have shapes only (fake kernel)."""
    function: Any = getattr(library, name).default
    names = [argument.name for argument in function._schema.arguments]

    def register(fake: Callable[[Any], T]) -> Callable[..., T]:
        torch.library.register_fake(
            f"isoload::{name}", lambda *args: fake(SimpleNamespace(**dict(zip(names, args, strict=True))))
        )
        result: Callable[..., T] = function
        return result

    return register


def ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def longs(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


_device_errors = op("device_errors")(lambda a: ints(a.like))


def device_errors(device: torch.device | str) -> int:
    """Return and clear the rules that ops on a device found broken since the last call: bit i for RULES[i].

    On CUDA an op with a wrong value continues (an id out of range counts as -1) and sets its bit in a word of the
    device's memory, whose address captured graphs contain. The host waits for the current stream.
    """
    return int(error_word(device))


def error_word(device: torch.device | str) -> Tensor:
    """Return :func:`device_errors` as a [] int32 tensor on the device, without a host wait."""
    errors: Tensor = _device_errors(torch.empty(0, device=device))
    return errors


def check_device(device: torch.device | str) -> None:
    """Raise ValueError with op, argument and rule for what ops on a device found broken: see :func:`device_errors`.
    With ISOLOAD_CHECK=1 every op runs this check itself, except in a graph that is being captured.
    """
    raise_broken(device_errors(device), device)


def raise_broken(broken: int, device: torch.device | str) -> None:
    if broken:
        rules = [rule for bit, rule in enumerate(RULES) if broken >> bit & 1]
        raise ValueError(f"{'; '.join(rules)} (found on {device}; ISOLOAD_CHECK=1 finds the call)")


def device_to_check(args: tuple[Any, ...]) -> torch.device | None:
    """Return the CUDA device of an op's arguments if ISOLOAD_CHECK=1 is set and the host may wait, else None."""
    if torch.compiler.is_compiling() or os.environ.get("ISOLOAD_CHECK") != "1":
        return None
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    return device if device.type == "cuda" and not torch.cuda.is_current_stream_capturing() else None


MARK = "isoload: "  # prefix by which csrc/check.h marks a refused argument
ON_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("isoload::count", "CUDA")


def call_on_cpu(op: Callable[..., T], *args: Any) -> T:
    try:
        return op(*args)
    except RuntimeError as error:
        text = str(error)
        if not text.startswith(MARK):
            raise
        raise ValueError(text[len(MARK) :].split("\nException raised")[0]) from None


def call_on_any(op: Callable[..., T], *args: Any) -> T:
    checked = device_to_check(args)
    if checked is None:
        return call_on_cpu(op, *args)
    # An op that reads tables runs on the host first: invalid tables would make a kernel access memory out of bounds.
    arguments = op._schema.arguments  # type: ignore[attr-defined]
    if any(a.name == "tables" and a.alias_info is None for a in arguments):
        call_on_cpu(op, *(arg.cpu() if isinstance(arg, Tensor) else arg for arg in args))
    result = call_on_cpu(op, *args)
    check_device(checked)
    return result


call = call_on_any if ON_CUDA else call_on_cpu
