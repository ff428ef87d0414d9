"""gpt-oss's experts in MXFP4, opened to bfloat16 as they are read: every value of theirs is one of bfloat16's.

``gate_up_proj_blocks`` [E, 2I, H / 32, 16] uint8 holds two e2m1 values per byte, the lower four bits first;
``gate_up_proj_scales`` [E, 2I, H / 32] uint8 a power of two per 32 values, 127 for 1; ``gate_up_proj_bias`` [E, 2I]
bfloat16; so does down_proj. Shapes: E experts, H width of a row, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from isoload.checkpoints.tensors import Tensors
from isoload.experts.weights import Activation, ClampedGLU

BLOCK = 32  # values that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same with the sign bit, the highest of four
NAN_SCALE = 255  # of e8m0


class GptOssLayout:
    """Reads a layer's stacks, in bfloat16; prefix: of its experts."""

    activation: ClassVar[Activation] = ClampedGLU()
    sample: ClassVar[str] = "down_bias"  # a small stack

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.sizes: dict[str, tuple[int, int]] = {}  # of a projection: out, in
        for name in ("gate_up", "down"):
            key = f"{prefix}{name}_proj_blocks"
            shape = tensors.shape(key)
            if len(shape) != 4 or shape[3] != BLOCK // 2:
                raise ValueError(
                    f"{key} in {tensors.where(key)} must be [E, out, in / {BLOCK}, {BLOCK // 2}], got {shape}"
                )
            self.num_experts, self.sizes[name] = shape[0], (shape[1], shape[2] * BLOCK)

    @staticmethod
    def fits(tensors: Tensors, prefix: str) -> bool:
        """Whether a checkpoint has this layout there."""
        return f"{prefix}gate_up_proj_blocks" in tensors.keys()  # noqa: SIM118

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """The rows of a stack; None where such experts have no such stack."""
        if name.endswith("_scale"):
            return None
        out, columns = self.sizes[name.removesuffix("_bias")]
        key, read = f"{self.prefix}{name.removesuffix('_bias')}_proj", self.tensors.read
        if name.endswith("_bias"):
            stack = torch.empty(len(experts), out, dtype=torch.bfloat16)
            for row, expert in zip(stack, experts, strict=True):
                row.copy_(read(f"{key}_bias", [self.num_experts, out], torch.bfloat16, expert))
            return stack
        stack = torch.empty(len(experts), out, columns, dtype=torch.bfloat16)
        shape = [self.num_experts, out, columns // BLOCK]
        for row, expert in zip(stack, experts, strict=True):
            blocks = read(f"{key}_blocks", [*shape, BLOCK // 2], torch.uint8, expert)
            opened = open_mxfp4(blocks, read(f"{key}_scales", shape, torch.uint8, expert))
            if not opened.isfinite().all():
                where = self.tensors.where(f"{key}_scales")
                raise ValueError(
                    f"{key}_scales in {where} must give values of bfloat16, got nan or more for expert {expert}"
                )
            row.copy_(opened)
        return stack


def open_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., in] bfloat16, exactly, from blocks [..., in / 32, 16] and scales [..., in / 32], both uint8.

    Scale 255 and what is larger than bfloat16's largest value give nan and inf.
    """
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [..., in / 32, 32]
    return _table()[scales.unsqueeze(-1).int() * 16 + halves.int()].flatten(-2)


def _table() -> Tensor:
    """[256 * 16] bfloat16: the value of every scale and e2m1 number."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    powers = torch.arange(NAN_SCALE + 1, dtype=torch.float64).sub(127).exp2()
    powers[NAN_SCALE] = torch.nan
    return torch.outer(powers, values).bfloat16().flatten()
