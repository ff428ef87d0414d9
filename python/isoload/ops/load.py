"""The compiled library, loaded once; its ops and the rules of its error word (csrc/ops/list.h)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def _load_library() -> tuple[str, ...]:
    found = sorted(Path(__file__).parents[1].glob("_C*.so"))
    if not found:
        raise ImportError("isoload's compiled ops are missing: run `make build` (or reinstall isoload)")
    torch.ops.load_library(str(found[0]))
    rules = ctypes.CDLL(str(found[0])).isoload_fault_rules
    rules.restype = ctypes.c_char_p
    text: bytes = rules()
    return tuple(text.decode().splitlines())


RULES = _load_library()  # one per bit of a device's error word
library = torch.ops.isoload
