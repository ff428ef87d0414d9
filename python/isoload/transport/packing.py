"""Columns of several dtypes side by side as bytes, so that one exchange carries them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_bytes(rows: Tensor) -> Tensor:
    """[n, bytes] uint8: rows [n, F] in their own memory, where they are contiguous."""
    if not rows.is_contiguous():  # not contiguous(), which fake tensors on a GPU cannot on torch's CPU build
        rows = rows.clone(memory_format=torch.contiguous_format)
    # by way of one dimension: rows of one value may have stride 0 and still be contiguous
    return rows.flatten().view(torch.uint8).view(len(rows), rows.shape[1] * rows.itemsize)


def pack(*columns: Tensor) -> Tensor:
    """[n, bytes] uint8: contiguous columns [n, F] side by side."""
    return torch.cat([as_bytes(column) for column in columns], dim=1)


def unpack(buffer: Tensor, layout: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """The columns of a packed buffer, given their widths and dtypes."""
    parts = buffer.split([width * dtype.itemsize for width, dtype in layout], dim=1)
    # clone, not contiguous(): a single row is contiguous already, at an offset that may suit no dtype
    return [
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, (_, dtype) in zip(parts, layout, strict=True)
    ]
