"""SwiGLU, gpt-oss's clamped GLU and a bias over ragged copies: forward and backward in one kernel each, float32 inside.

Shapes: C places of which the first ends[-1] hold copies (a number on the device, so the host never waits), width I.
The tail behind them is neither read nor written. The twins are SwiGLU and ClampedGLU in isoload.weights.experts and
_AddBias in isoload.weights.compute.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isoload.kernels import cover, tile

# Programs stride over the tiles that hold copies, so a long tail costs no more than these; a few per thread block
# that a GPU can hold at once, so that they even out.
PROGRAMS = 16384
# Of every layer and placement another number: no reason to compile anew. One value is loaded of ends.
SIZES = {"do_not_specialize": ["num_slots"], "do_not_specialize_on_alignment": ["ends"]}
BIAS_SIZES = {"do_not_specialize": ["num_slots"], "do_not_specialize_on_alignment": ["slot", "ends"]}


@triton.jit
def _halves(gate_up, row, column, pair, num_copies, width, CLAMPED: tl.constexpr):
    """Gate and up of a tile in float32: side by side in memory, or, clamped, alternating over `pair` columns."""
    start, there = gate_up + row[:, None] * (2 * width), (row < num_copies)[:, None]
    if CLAMPED:
        both = tl.load(start + pair[None, :], mask=there & (pair < 2 * width)[None, :], other=0)
        gate, up = both.reshape(row.shape[0], column.shape[0], 2).split()
    else:
        gate = tl.load(start + column[None, :], mask=there & (column < width)[None, :], other=0)
        up = tl.load(start + width + column[None, :], mask=there & (column < width)[None, :], other=0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _clamp(gate, up, limit):
    """Both at most limit, up at least -limit; unlike minimum and maximum this keeps nan."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit(**SIZES)
def _forward_kernel(
    gate_up, ends, inner, num_slots, width, alpha, limit,
    CLAMPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_copies, across = tl.load(ends + num_slots - 1), tl.cdiv(width, BLOCK)
    for part in range(tl.program_id(0), tl.cdiv(num_copies, ROWS) * across, tl.num_programs(0)):
        row = (part // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = part % across * BLOCK + tl.arange(0, BLOCK)
        pair = part % across * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        inside = (row < num_copies)[:, None] & (column < width)[None, :]
        gate, up = _halves(gate_up, row, column, pair, num_copies, width, CLAMPED)
        if CLAMPED:
            gate, up = _clamp(gate, up, limit)
            result = (up + 1) * gate * tl.sigmoid(alpha * gate)
        else:
            result = gate * tl.sigmoid(gate) * up
        tl.store(inner + row[:, None] * width + column[None, :], result, mask=inside)


@triton.jit(**SIZES)
def _backward_kernel(
    grad, gate_up, ends, to_gate_up, num_slots, width, alpha, limit,
    CLAMPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_copies, across = tl.load(ends + num_slots - 1), tl.cdiv(width, BLOCK)
    for part in range(tl.program_id(0), tl.cdiv(num_copies, ROWS) * across, tl.num_programs(0)):
        row = (part // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = part % across * BLOCK + tl.arange(0, BLOCK)
        pair = part % across * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        inside = (row < num_copies)[:, None] & (column < width)[None, :]
        gate, up = _halves(gate_up, row, column, pair, num_copies, width, CLAMPED)
        given = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0).to(tl.float32)
        start = to_gate_up + row[:, None] * (2 * width)
        if CLAMPED:
            held_gate, held_up = _clamp(gate, up, limit)
            sigmoid = tl.sigmoid(alpha * held_gate)
            slope = sigmoid * (1 + alpha * held_gate * (1 - sigmoid))
            to_gate = tl.where(gate <= limit, given * (held_up + 1) * slope, 0)
            to_up = tl.where((up >= -limit) & (up <= limit), given * held_gate * sigmoid, 0)
            both = tl.join(to_gate, to_up).reshape(ROWS, 2 * BLOCK)
            tl.store(
                start + pair[None, :], both, mask=(row < num_copies)[:, None] & (pair < 2 * width)[None, :]
            )
        else:
            sigmoid = tl.sigmoid(gate)
            tl.store(start + column[None, :], given * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
            tl.store(start + width + column[None, :], given * gate * sigmoid, mask=inside)


def _launch(kernel: Any, read: list[Tensor], ends: Tensor, written: Tensor, width: int, *more: float) -> None:
    """Runs a kernel on contiguous tensors, of which it writes the last, [C, .]."""
    cut = tile(width)
    tiles = cover(len(written), cut["ROWS"]) * cover(width, cut["BLOCK"])
    if tiles and len(ends):
        with torch.cuda.device_of(written):
            kernel[(min(tiles, PROGRAMS),)](*read, ends, written, len(ends), width, *more, **cut)


def _clamped(clamp: tuple[float, float] | None) -> tuple[float, float, bool]:
    """alpha, limit and CLAMPED; an int would be compiled as one."""
    alpha, limit = map(float, clamp or (0, 0))
    return alpha, limit, clamp is not None


def activate(gate_up: Tensor, ends: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """[C, I] from gate_up [C, 2I]: SwiGLU, or, with clamp = (alpha, limit), the clamped GLU."""
    width = gate_up.shape[1] // 2
    inner = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
    _launch(_forward_kernel, [gate_up.contiguous()], ends, inner, width, *_clamped(clamp))
    return inner


def activate_backward(
    grad: Tensor, gate_up: Tensor, ends: Tensor, clamp: tuple[float, float] | None
) -> Tensor:
    """The gradient to gate_up [C, 2I], from grad [C, I]."""
    to_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    read = [grad.contiguous(), gate_up.contiguous()]
    _launch(_backward_kernel, read, ends, to_gate_up, gate_up.shape[1] // 2, *_clamped(clamp))
    return to_gate_up


@triton.jit(**BIAS_SIZES)
def _add_kernel(bias, slot, ends, y, num_slots, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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
    _launch(_add_kernel, [bias.contiguous(), slot.contiguous()], ends, y, y.shape[1])
