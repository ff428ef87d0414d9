"""A slot's bias added to its copies where they lie: what is behind them is neither read nor written.

Shapes: as in isoload.kernels.activation, with width F. The twin is in isoload.experts.grouped_linear.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isoload.kernels import cover, tile
from isoload.kernels.activation import PROGRAMS

# As activation's.
SIZES = {"do_not_specialize": ["num_slots"], "do_not_specialize_on_alignment": ["slot", "ends"]}


@triton.jit(**SIZES)
def _add_kernel(y, bias, slot, ends, num_slots, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    num_copies, across = tl.load(ends + num_slots - 1), tl.cdiv(width, BLOCK)
    for part in range(tl.program_id(0), tl.cdiv(num_copies, ROWS) * across, tl.num_programs(0)):
        row = (part // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = part % across * BLOCK + tl.arange(0, BLOCK)
        inside = (row < num_copies)[:, None] & (column < width)[None, :]
        of = tl.load(slot + row, mask=row < num_copies, other=0)
        at = y + row[:, None] * width + column[None, :]
        added = tl.load(bias + of[:, None] * width + column[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(at, tl.load(at, mask=inside, other=0).to(tl.float32) + added, mask=inside)


def add_bias(y: Tensor, bias: Tensor, slot: Tensor, ends: Tensor) -> None:
    """y [C, F], contiguous, gains bias [S, F] of each copy's slot [C] int64; rounded once."""
    cut, (num_places, width) = tile(y.shape[1]), y.shape
    tiles = cover(num_places, cut["ROWS"]) * cover(width, cut["BLOCK"])
    if tiles and len(ends):
        with torch.cuda.device_of(y):
            _add_kernel[(min(tiles, PROGRAMS),)](
                y, bias.contiguous(), slot.contiguous(), ends, len(ends), width, **cut
            )
