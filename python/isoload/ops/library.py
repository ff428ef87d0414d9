"""The compiled library: loaded once, its refusals turned into ValueError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoload.ops.device_errors import check_each

MARK = "isoload: "  # how csrc/check.h marks a refused argument


def _load_library() -> None:
    found = sorted(Path(__file__).parents[1].glob("_C*.so"))
    if not found:
        raise ImportError("isoload's compiled ops are missing: run `make build` (or reinstall isoload)")
    torch.ops.load_library(str(found[0]))


_load_library()
library = torch.ops.isoload
ON_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("isoload::count", "CUDA")


def call(op: Callable[..., Any], *args: Any) -> Any:
    try:
        result = op(*args)
    except RuntimeError as error:
        text = str(error)
        if not text.startswith(MARK):
            raise
        raise ValueError(text[len(MARK) :].split("\nException raised")[0]) from None
    if ON_CUDA:
        check_each(args)
    return result


@torch.library.register_fake("isoload::device_errors")
def _(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.int32)
