"""How wrappers call the compiled library: its refusals become ValueError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoload.ops.device_errors import check_device, device_to_check
from isoload.ops.load import T, ints, like, longs, op

__all__ = ["ON_CUDA", "call", "ints", "like", "longs", "op"]

MARK = "isoload: "  # how csrc/check.h marks a refused argument
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
    check_tables(op, args)
    result = call_on_cpu(op, *args)
    check_device(checked)
    return result


def check_tables(op: Any, args: tuple[Any, ...]) -> None:
    """Runs an op that reads tables on the host first: made-up ones would lead a kernel out of its memory."""
    if any(a.name == "tables" and a.alias_info is None for a in op._schema.arguments):
        call_on_cpu(op, *(arg.cpu() if isinstance(arg, Tensor) else arg for arg in args))


call = call_on_any if ON_CUDA else call_on_cpu
