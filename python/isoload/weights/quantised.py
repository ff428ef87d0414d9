"""Quantised weights: bytes and their scales, for inference. Shapes: S slots, C sorted copies, H and I widths.

Sources: fp8, DeepSeek-V3's report, section 3.3.2; MXFP8, MXFP4, e4m3, e2m1 and e8m0, OCP Microscaling Formats (MX)
v1.0; NVFP4, NVIDIA's "Introducing NVFP4"; the order of a byte's two e2m1, gpt-oss and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isoload.ops.results import Grouping

FP8 = torch.float8_e4m3fn
SizesAndDtypes = tuple[list[int], Sequence[torch.dtype]]
BYTES = torch.uint8  # weights: two e2m1 values each, the lower four bits first; scales: e8m0, 127 for 1


class Format(NamedTuple):
    """The values of a matrix that share a scale; identified by the dtypes of weights and scales."""

    name: str
    scale: torch.dtype
    rows: int  # rows that share a scale; the last block of a side may be smaller
    columns: int
    has_second: bool = False  # a float32 scale for a whole matrix, in addition to those of its blocks

    def blocks(self, out: int, columns: int) -> list[int]:
        return [-(-out // self.rows), -(-columns // self.columns)]


FORMATS = {
    (FP8, torch.float32): Format("fp8", torch.float32, 128, 128),
    (FP8, BYTES): Format("MXFP8", BYTES, 1, 32),
    (BYTES, BYTES): Format("MXFP4", BYTES, 1, 32),
    (BYTES, FP8): Format("NVFP4", FP8, 1, 16, has_second=True),
}


def per_element(dtype: torch.dtype) -> int:
    """Return the number of values in an element of a stack of weights."""
    return 2 if dtype == BYTES else 1


def scales_of(form: Format, num_slots: int, hidden: int, intermediate: int) -> dict[str, SizesAndDtypes]:
    rows, columns = form.blocks(intermediate, hidden)
    gate_up = [2, rows, columns] if form.rows > 1 else [2 * rows, columns]
    scales: dict[str, SizesAndDtypes] = {
        "gate_up_scale": ([num_slots, *gate_up], (form.scale,)),
        "down_scale": ([num_slots, *form.blocks(hidden, intermediate)], (form.scale,)),
    }
    if form.has_second:
        scales["gate_up_scale_2"] = [num_slots, 2], (torch.float32,)
        scales["down_scale_2"] = [num_slots, 1], (torch.float32,)
    return scales


def dequantise(weight: Tensor, scale: Tensor, scale_2: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """Return [..., out, in]: every value times its block's scale, then its matrix's, in float32, rounded to a dtype.
    `weight` is [..., out, in] e4m3, or [..., out, in / 2] bytes. If `scale` [..., blocks of out, blocks of in] has one
    dimension more, out is numbered through its matrices. `scale_2` [..., n] is for n equal parts of out.
    """
    form = FORMATS[weight.dtype, scale.dtype]
    if weight.dtype == FP8:
        values = weight.float()
    else:
        halves = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2)
        # e4m3 with the same sign, exponent and mantissa is smaller by the difference of the biases, subnormals too.
        values = ((halves & 8) << 4 | (halves & 7) << 2).view(FP8).float().mul_(2.0**6)
    shape = values.shape
    values = values.reshape(*scale.shape[:-2], -1, shape[-1])
    wide = (scale.view(torch.float8_e8m0fnu) if scale.dtype == BYTES else scale).float()
    wide = wide.repeat_interleave(form.rows, -2).narrow(-2, 0, values.shape[-2])
    values.mul_(wide.repeat_interleave(form.columns, -1).narrow(-1, 0, shape[-1]))
    if scale_2 is not None:
        values = values.view(*scale_2.shape, -1, shape[-1]).mul_(scale_2.unsqueeze(-1).unsqueeze(-1))
    return values.to(dtype).view(shape)


def check_no_gradients() -> None:
    """Raise ValueError if gradients are recorded: quantised weights have none, nor do rows that passed through them."""
    if torch.is_grad_enabled():
        raise ValueError(
            "quantised experts must run under torch.no_grad() or torch.inference_mode(), got gradients recorded"
        )


def check_stay(stacks: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise ValueError if stacks of quantised experts have been cast from these dtypes or require gradients."""
    for name, stack in stacks.items():
        if stack.dtype != dtypes.get(name, stack.dtype):
            raise ValueError(
                f"{name} must stay {dtypes[name]}, since quantised experts cannot be cast (.to(dtype)), got "
                f"{stack.dtype}: their values are lost"
            )
        if stack.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, which quantised experts do not have, got one"
            )


def quantised_linear(
    x: Tensor, stacks: Sequence[Tensor], bias: Tensor | None, grouping: Grouping, grouped: bool
) -> Tensor:
    """Multiply sorted copies x [C, in] by their slots' dequantised matrices; rows after the last copy are undefined."""
    bias = None if bias is None else bias.to(x.dtype)
    if x.device.type == "cpu" or not grouped:
        return _one_by_one(x, stacks, bias, grouping.ends, grouped)
    y = _at_once(x, stacks, grouping.ends)
    return y if bias is None else y + bias.index_select(0, grouping.slot)


def _one_by_one(
    x: Tensor, stacks: Sequence[Tensor], bias: Tensor | None, ends: Tensor, grouped: bool
) -> Tensor:
    """Dequantise one matrix at a time, of slots with copies only. The host must have read ends."""
    parts, start = [], 0
    for slot, end in enumerate(ends.tolist()):
        if end > start:
            matrix = dequantise(*(stack[slot] for stack in stacks), dtype=x.dtype)
            parts.append(_multiply(x[start:end], matrix, None if bias is None else bias[slot], grouped))
        start = end
    return torch.cat([*parts, x.new_zeros(len(x) - start, stacks[0].shape[1])])


def _at_once(x: Tensor, stacks: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Run a device's grouped GEMM without a host wait, with all matrices [S, out, in] temporarily in x's dtype."""
    stack = torch.stack([dequantise(*slot, dtype=x.dtype) for slot in zip(*stacks, strict=True)])
    return F.grouped_mm(x, stack.transpose(1, 2), offs=ends)


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, grouped: bool) -> Tensor:
    """Multiply [n, in] by [out, in], by the kernel that a stack of such matrices would use."""
    if not grouped:
        return F.linear(x, matrix, bias)
    ends = torch.tensor([len(x)], dtype=torch.int32, device=x.device)
    y = F.grouped_mm(x, matrix.unsqueeze(0).transpose(1, 2), offs=ends)
    return y if bias is None else y + bias
