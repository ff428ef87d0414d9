"""DeepSeek-V3's experts: a matrix of e4m3 and its scales [ceil(out / 128), ceil(in / 128)] for each projection.

``0.gate_proj.weight``, ``0.gate_proj.weight_scale_inv``, ``0.up_proj.weight`` and so on behind a layer's prefix. The
scale multiplies, whatever its name says. Shapes: E experts, H width of a row, I intermediate width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from isoload.weights.checkpoints import Tensors
from isoload.weights.experts import Activation, SwiGLU
from isoload.weights.quantised import FORMATS, FP8

PARTS = {
    "gate_up": ("gate_proj.weight", "up_proj.weight"),
    "down": ("down_proj.weight",),
    "gate_up_scale": ("gate_proj.weight_scale_inv", "up_proj.weight_scale_inv"),
    "down_scale": ("down_proj.weight_scale_inv",),
}


class DeepSeekV3Layout:
    """Reads a layer's stacks as they are, in fp8; prefix: of its experts."""

    activation: ClassVar[Activation] = SwiGLU()
    sample: ClassVar[str] = "down_scale"  # a small stack

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        pattern = re.compile(re.escape(prefix) + r"(\d{1,9})\.")
        found = sorted({int(match[1]) for key in tensors.keys() if (match := pattern.match(key))})  # noqa: SIM118
        if found != list(range(len(found))):
            missing = next(i for i, expert in enumerate(found) if i != expert)
            raise ValueError(
                f"{tensors.where('')} must have all experts under {prefix}, got {found[-1]} and no {missing}"
            )
        self.num_experts = len(found)
        shape = tensors.shape(key := f"{prefix}0.gate_proj.weight")
        if len(shape) != 2:
            raise ValueError(f"{key} in {tensors.where(key)} must be [I, H], got {shape}")
        self.intermediate, self.hidden = shape

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """The rows of a stack; None where experts in fp8 have no such stack."""
        if name not in PARTS:
            return None
        dtype = torch.float32 if name.endswith("_scale") else FP8
        out, columns = self.intermediate, self.hidden
        if name.startswith("down"):
            out, columns = columns, out
        if name.endswith("_scale"):
            out, columns = FORMATS[FP8, dtype].blocks(out, columns)
        parts = PARTS[name]
        stack = torch.empty(len(experts), len(parts), out, columns, dtype=dtype)
        for row, expert in zip(stack, experts, strict=True):
            for place, part in zip(row, parts, strict=True):
                key = f"{self.prefix}{expert}.{part}"
                place.copy_(self.tensors.read(key, [out, columns], dtype))
                if dtype != FP8 and not place.isfinite().all():
                    raise ValueError(f"{key} in {self.tensors.where(key)} must be finite, got nan or inf")
        if name == "gate_up_scale":
            return stack
        return stack.flatten(1, 2)
