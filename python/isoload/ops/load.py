"""The compiled library, loaded once; its ops, its C functions, the rules of its error word (csrc/ops/list.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def _load_library() -> ctypes.CDLL:
    found = sorted(Path(__file__).parents[1].glob("_C*.so"))
    if not found:
        raise ImportError("isoload's compiled ops are missing: run `make build` (or reinstall isoload)")
    torch.ops.load_library(str(found[0]))
    return ctypes.CDLL(str(found[0]))


LIBRARY = _load_library()  # for its C functions
LIBRARY.isoload_fault_rules.restype = ctypes.c_char_p
RULES = tuple(LIBRARY.isoload_fault_rules().decode().splitlines())  # one per bit of a device's error word
library = torch.ops.isoload


def op(name: str, fake: Callable[[Any], T]) -> Callable[..., T]:
    """The op of a name. fake: of its arguments, by the schema's names, makes results that only have shapes."""
    made: Callable[..., T] = getattr(library, name).default
    names = [argument.name for argument in getattr(library, name).default._schema.arguments]
    torch.library.register_fake(
        f"isoload::{name}", lambda *args: fake(SimpleNamespace(**dict(zip(names, args, strict=True))))
    )
    return made


def ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def longs(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)
