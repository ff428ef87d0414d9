"""Weights in fp8: e4m3 with a float32 scale per 128x128 block, as DeepSeek-V3 ships its experts. For inference.

They are dequantised to the rows' dtype and multiplied in it: this is no fp8 GEMM. Shapes: S slots, C sorted copies, H
width of a row, I intermediate width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
BLOCK = 128  # rows, and columns, of a matrix that share a scale; the last block of either is cut short


def num_blocks(size: int) -> int:
    """Blocks along a side of a matrix."""
    return -(-size // BLOCK)


def scale_shapes(num_slots: int, hidden: int, intermediate: int) -> dict[str, list[int]]:
    """Of the scales beside stacks gate_up [S, 2I, H] and down [S, H, I]. Gate and up have blocks of their own."""
    rows, columns = num_blocks(intermediate), num_blocks(hidden)
    return {"gate_up_scale": [num_slots, 2, rows, columns], "down_scale": [num_slots, columns, rows]}


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Every value times its block's scale: the product in float32, rounded once.

    Takes 8 bytes for each value on the way, beside the result.

    Args:
        weight: [..., out, in] e4m3; out counts through the matrices where scale has one dimension more.
        scale: [..., ceil(out / 128), ceil(in / 128)] float32.
        dtype: of the result.

    Returns:
        weight's shape.
    """
    matrices = weight.reshape(*scale.shape[:-2], -1, weight.shape[-1])
    wide = scale.repeat_interleave(BLOCK, -2).narrow(-2, 0, matrices.shape[-2])
    wide = wide.repeat_interleave(BLOCK, -1).narrow(-1, 0, matrices.shape[-1])
    return matrices.float().mul_(wide).to(dtype).view(weight.shape)


def check_no_gradients() -> None:
    """Raises ValueError where gradients are recorded: weights in fp8 have none, nor do rows that went through them."""
    if torch.is_grad_enabled():
        raise ValueError(
            "experts in fp8 must run under torch.no_grad() or torch.inference_mode(), got gradients recorded"
        )


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, ends: Tensor, grouped: bool) -> Tensor:
    """Sorted copies by the dequantised matrices of their slots; the tail behind the last copy is undefined.

    Args:
        x: [C, in].
        weight, scale: [S, ...], see :func:`dequantise`.
        ends: [S] int32, see isoload.experts.grouping.
        grouped: whether grouped_mm takes matrices of x's dtype and this size; else plain products.

    Returns:
        [C, out] in x's dtype.
    """
    one_by_one = x.device.type == "cpu" or not grouped
    return _one_by_one(x, weight, scale, ends, grouped) if one_by_one else _at_once(x, weight, scale, ends)


def _one_by_one(x: Tensor, weight: Tensor, scale: Tensor, ends: Tensor, grouped: bool) -> Tensor:
    """One matrix is dequantised at a time, of slots with copies only. The host must have read ends."""
    parts, start = [], 0
    for w, s, end in zip(weight, scale, ends.tolist(), strict=True):
        if end > start:
            parts.append(_multiply(x[start:end], dequantise(w, s, x.dtype), grouped))
        start = end
    return torch.cat([*parts, x.new_zeros(len(x) - start, weight.shape[1])])


def _at_once(x: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """A device's grouped GEMM, so that the host waits for nothing. Meanwhile the stack [S, out, in] is there in x's
    dtype."""
    stack = torch.stack([dequantise(w, s, x.dtype) for w, s in zip(weight, scale, strict=True)])
    return F.grouped_mm(x, stack.transpose(1, 2), offs=ends)


def _multiply(x: Tensor, matrix: Tensor, grouped: bool) -> Tensor:
    """[n, in] by [out, in], by the kernel that a stack of such matrices would take."""
    if not grouped:
        return F.linear(x, matrix)
    ends = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
    return F.grouped_mm(x, matrix.unsqueeze(0).transpose(1, 2), offs=ends)
