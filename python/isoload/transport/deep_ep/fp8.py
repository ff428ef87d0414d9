"""Rows as DeepEP carries them in fp8: e4m3 with a float32 scale per 128 columns of a token, DeepSeek-V3's recipe."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # columns that share a scale
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-4  # that a block's largest value is taken for: DeepEP's own cast has it


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] -> float8_e4m3fn [T, H] and scales [T, H / 128] float32, whose product is x to within 1/16 of it."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    return (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2), scales


def from_fp8(rows: Tensor, scales: Tensor) -> Tensor:
    """[..., H] bfloat16 from rows [..., H] float8_e4m3fn and scales [..., H / 128]."""
    blocks: Tensor = rows.float().unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(-2).bfloat16()
