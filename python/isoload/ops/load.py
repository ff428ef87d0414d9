"""The compiled library, loaded once; its ops, its C functions, the rules of its error word (csrc/ops/list.h)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def _load_library() -> ctypes.CDLL:
    found = sorted(Path(__file__).parents[1].glob("_C*.so"))
    if not found:
        raise ImportError("isoload's compiled ops are missing: run `make build` (or reinstall isoload)")
    torch.ops.load_library(str(found[0]))
    return ctypes.CDLL(str(found[0]))


def _read_rules(library: ctypes.CDLL) -> tuple[str, ...]:
    rules = library.isoload_fault_rules
    rules.restype = ctypes.c_char_p
    text: bytes = rules()
    return tuple(text.decode().splitlines())


LIBRARY = _load_library()  # for its C functions
RULES = _read_rules(LIBRARY)  # one per bit of a device's error word
library = torch.ops.isoload
