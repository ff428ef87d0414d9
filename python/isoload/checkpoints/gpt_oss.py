"""gpt-oss's experts in MXFP4, as bytes, or opened to bfloat16 as they are read: their values are all bfloat16's.

``gate_up_proj_blocks`` [E, 2I, H / 32, 16] uint8 holds two e2m1 values per byte, the lower four bits first;
``gate_up_proj_scales`` [E, 2I, H / 32] uint8 a power of two per 32 values, 127 for 1; ``gate_up_proj_bias`` [E, 2I]
bfloat16; so does down_proj. Shapes: E experts, H width of a row, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from isoload.weights.checkpoints import Tensors
from isoload.weights.experts import Activation, ClampedGLU
from isoload.weights.quantised import dequantise

BLOCK = 32  # values that share a scale


class GptOssLayout:
    """Reads a layer's stacks, in bfloat16 or as_bytes; prefix: of its experts."""

    activation: ClassVar[Activation] = ClampedGLU()
    sample: ClassVar[str] = "down_bias"  # a small stack

    def __init__(self, tensors: Tensors, prefix: str, as_bytes: bool = False) -> None:
        self.tensors, self.prefix, self.as_bytes = tensors, prefix, as_bytes
        self.sizes: dict[str, tuple[int, int]] = {}  # of a projection: out, in
        for name in ("gate_up", "down"):
            key = f"{prefix}{name}_proj_blocks"
            shape = tensors.shape(key)
            if len(shape) != 4 or shape[3] != BLOCK // 2:
                raise ValueError(
                    f"{key} in {tensors.where(key)} must be [E, out, in / {BLOCK}, {BLOCK // 2}], got {shape}"
                )
            self.num_experts, self.sizes[name] = shape[0], (shape[1], shape[2] * BLOCK)

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """The rows of a stack; None where such experts have no such stack."""
        is_scale = name.endswith("_scale")
        if name.endswith("_scale_2") or (is_scale and not self.as_bytes):
            return None
        of = name.removesuffix("_bias").removesuffix("_scale")
        out, columns = self.sizes[of]
        if name.endswith("_bias"):
            key, shape = f"{self.prefix}{of}_proj_bias", [self.num_experts, out]
            rows = [self.tensors.read(key, shape, torch.bfloat16, expert) for expert in experts]
            return torch.stack(rows) if rows else torch.empty(0, out, dtype=torch.bfloat16)
        width = columns if not self.as_bytes else columns // (BLOCK if is_scale else 2)
        stack = torch.empty(len(experts), out, width, dtype=torch.uint8 if self.as_bytes else torch.bfloat16)
        for row, expert in zip(stack, experts, strict=True):
            packed, scales, opened = self._read(of, expert)
            row.copy_((scales if is_scale else packed) if self.as_bytes else opened)
        return stack

    def _read(self, of: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """One expert's bytes [out, in / 2], scales [out, in / 32] and values [out, in] of a projection."""
        (out, columns), key = self.sizes[of], f"{self.prefix}{of}_proj"
        shape = [self.num_experts, out, columns // BLOCK]
        packed = self.tensors.read(f"{key}_blocks", [*shape, BLOCK // 2], torch.uint8, expert).flatten(-2)
        scales = self.tensors.read(f"{key}_scales", shape, torch.uint8, expert)
        opened = dequantise(packed, scales, dtype=torch.bfloat16)
        if not opened.isfinite().all():
            where = self.tensors.where(f"{key}_scales")
            raise ValueError(
                f"{key}_scales in {where} must give values of bfloat16, got nan or more for expert {expert}"
            )
        return packed, scales, opened
