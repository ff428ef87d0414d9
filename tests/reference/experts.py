"""The experts of one rank, one copy at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def run_experts(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamped: tuple[float, float] | None = None,
) -> Tensor:
    """[N, H] in the dtype given: for each row the sum over its copies of ``weight * expert(row)``.

    Args:
        rows: [N, H].
        slots: [N, K] local slots into the stacks; -1 = absent.
        weights: [N, K].
        gate_up, down, gate_up_bias, down_bias: [S, 2I, H], [S, H, I], [S, 2I], [S, H].
        clamped: gpt-oss's (alpha, limit); None = SwiGLU.
    """
    results = []
    for row, row_slots, row_weights in zip(rows, slots.tolist(), weights, strict=True):
        total = torch.zeros_like(row)
        for slot, weight in zip(row_slots, row_weights, strict=True):
            if slot == -1:
                continue
            hidden = gate_up[slot] @ row
            if gate_up_bias is not None:
                hidden = hidden + gate_up_bias[slot]
            result = down[slot] @ activate(hidden, clamped)
            if down_bias is not None:
                result = result + down_bias[slot]
            total = total + weight * result
        results.append(total)
    return torch.stack(results) if results else torch.zeros_like(rows)


def activate(hidden: Tensor, clamped: tuple[float, float] | None) -> Tensor:
    """[2I] -> [I] from the formulas: halves for SwiGLU, even and odd places for gpt-oss."""
    if clamped is None:
        inner = len(hidden) // 2
        return _silu(hidden[:inner], 1.0) * hidden[inner:]
    alpha, limit = clamped
    gates, ups = hidden[0::2].clamp(max=limit), hidden[1::2].clamp(min=-limit, max=limit)
    return (ups + 1) * _silu(gates, alpha)


def _silu(x: Tensor, alpha: float) -> Tensor:
    return x / (1 + torch.exp(-alpha * x))
