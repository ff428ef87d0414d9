"""Experts in fp8, and what they stand for: block by block, in plain loops over 128x128 blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from isoload.weights.experts import ExpertWeights

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


def blocks_of(matrix: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(row, column, view) of every block of a matrix [out, in]; the last of a side may be cut short."""
    for i, rows in enumerate(matrix.split(128, 0)):
        for j, block in enumerate(rows.split(128, 1)):
            yield i, j, block


def quantise_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 [out, in] and float32 scales [ceil(out / 128), ceil(in / 128)]."""
    values = torch.empty(matrix.shape, dtype=FP8)
    scale = torch.empty(-(-matrix.shape[0] // 128), -(-matrix.shape[1] // 128))
    to = {(i, j): block for i, j, block in blocks_of(values)}
    for i, j, block in blocks_of(matrix.float()):
        scale[i, j] = block.abs().max().clamp(min=1e-12) / LARGEST
        to[i, j].copy_((block / scale[i, j]).to(FP8))
    return values, scale


def open_matrix(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, rounded to a dtype."""
    opened = values.float()
    for i, j, block in blocks_of(opened):
        block.mul_(float(scale[i, j]))
    return opened.to(dtype)


def quantise(dense: ExpertWeights) -> ExpertWeights:
    """The experts in fp8; gate and up each in blocks of their own."""
    halves = [quantise_matrix(half) for expert in dense.gate_up for half in expert.chunk(2)]
    downs = [quantise_matrix(expert) for expert in dense.down]
    return ExpertWeights(
        torch.stack([values.view(torch.uint8) for values, _ in halves]).view(FP8).view(dense.gate_up.shape),
        torch.stack([values.view(torch.uint8) for values, _ in downs]).view(FP8),
        gate_up_scale=torch.stack([scale for _, scale in halves]).unflatten(0, (-1, 2)),
        down_scale=torch.stack([scale for _, scale in downs]),
    )


def open_experts(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The dense experts that experts in fp8 stand for."""
    gate_up, down = [], []
    for expert in range(weights.num_slots):
        halves = weights.gate_up[expert].chunk(2)
        scales = weights.gate_up_scale[expert]
        gate_up.append(torch.cat([open_matrix(h, s, dtype) for h, s in zip(halves, scales, strict=True)]))
        down.append(open_matrix(weights.down[expert], weights.down_scale[expert], dtype))
    return ExpertWeights(torch.stack(gate_up), torch.stack(down))


def random_experts(
    num_slots: int, hidden: int, intermediate: int, generator: torch.Generator
) -> ExpertWeights:
    """In fp8; the sizes of neighbouring blocks differ by powers of ten, so that another block's scale shows."""
    dense = ExpertWeights.random(num_slots, hidden, intermediate, generator=generator)
    for stack in (dense.gate_up, dense.down):
        for matrix in stack:
            for i, j, block in blocks_of(matrix):
                block.mul_(10.0 ** ((i + 2 * j) % 3 - 1))
    return quantise(dense)
