"""Experts in every quantised format, of random bytes, and what they stand for by the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.weights.experts import ExpertWeights
from reference import quantised as reference

NAMES = list(reference.BLOCKS)
FP8 = torch.float8_e4m3fn


def random_quantised(
    name: str, num_slots: int, hidden: int, intermediate: int, seed: int, bias: torch.dtype | None = None
) -> ExpertWeights:
    """Numbers only; scales of neighbours differ by powers of two, so that another block's shows."""
    print("seed", seed)
    draw = torch.Generator().manual_seed(seed)
    rows, columns = reference.BLOCKS[name]

    def whole(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, (num_slots, *sizes), generator=draw).to(torch.uint8)

    def weight(out: int, width: int) -> Tensor:
        if name in ("MXFP4", "NVFP4"):
            return whole(0, 256, out, width // 2)
        values = whole(0, 0x7F, out, width) | whole(0, 2, out, width) << 7
        return values.view(FP8)

    def scale(halves: int, out: int, width: int) -> Tensor:
        sizes = [-(-out // rows), -(-width // columns)]
        sizes = [halves, *sizes] if rows > 1 and halves == 2 else [halves * sizes[0], sizes[1]]
        if name == "fp8":
            return 2.0 ** -whole(11, 16, *sizes).float() * (1 + whole(0, 256, *sizes).float() / 256)
        if name == "NVFP4":
            return whole(0x10, 0x38, *sizes).view(FP8)  # 2**-5 to nearly 1
        return whole(*((112, 118) if name == "MXFP8" else (120, 126)), *sizes)

    def second(halves: int) -> Tensor | None:
        if name != "NVFP4":
            return None
        return 0.05 + torch.rand(num_slots, halves, generator=draw)

    def biases(out: int) -> Tensor | None:
        return None if bias is None else torch.randn(num_slots, out, generator=draw).to(bias)

    return ExpertWeights(
        weight(2 * intermediate, hidden),
        weight(hidden, intermediate),
        biases(2 * intermediate),
        biases(hidden),
        scale(2, intermediate, hidden),
        scale(1, hidden, intermediate),
        second(2),
        second(1),
    )


def open_matrix(
    name: str, weight: Tensor, scale: Tensor, second: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """One matrix [out, in], rounded to float32 and then to a dtype."""
    as_numbers = scale if name == "fp8" else scale.view(torch.uint8)
    exact = reference.dequantise(
        name, weight.view(torch.uint8).numpy(), as_numbers.numpy(), [] if second is None else second.tolist()
    )
    return torch.from_numpy(exact).float().to(dtype)


def open_quantised(name: str, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The dense experts that they stand for."""
    stacks: dict[str, list[Tensor]] = {"gate_up": [], "down": []}
    for slot in range(weights.num_slots):
        for of, opened in stacks.items():
            weight, scale, second = (getattr(weights, of + part) for part in ("", "_scale", "_scale_2"))
            second = None if second is None else second[slot]
            if scale.dim() == 4:  # fp8's gate and up have blocks of their own
                halves = zip(weight[slot].chunk(2), scale[slot], strict=True)
                opened.append(torch.cat([open_matrix(name, w, s, None, dtype) for w, s in halves]))
            else:
                opened.append(open_matrix(name, weight[slot], scale[slot], second, dtype))
    biases = [b if b is None else b.to(dtype) for b in (weights.gate_up_bias, weights.down_bias)]
    return ExpertWeights(*map(torch.stack, stacks.values()), *biases)
