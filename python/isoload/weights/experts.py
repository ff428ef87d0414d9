"""ExpertWeights: the stacked weights of some slots, the activation, and how they are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isoload.weights.quantised import BYTES, FORMATS, FP8, Format, SizesAndDtypes, per_element, scales_of

PARTS = ("", "_bias", "_scale", "_scale_2")
NAMES = tuple(name + part for part in PARTS for name in ("gate_up", "down"))  # of all stacks
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROW_BYTES = 16  # grouped_mm requires that rows of matrices start at multiples of this


@dataclass(frozen=True)
class SwiGLU:
    """``silu(gate) * up``; gate is the first half of the projection, up the second."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


@dataclass(frozen=True)
class ClampedGLU:
    """gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``; gate <= limit in even columns, up within +-limit in odd."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


Activation = SwiGLU | ClampedGLU


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of S slots, stacked. A row is one output, as in nn.Linear, so checkpoints need no transposing.

    Quantised weights (inference only) have scales, which multiply blocks of a matrix, rows by columns; the last block
    of a side may be smaller: fp8, e4m3 and float32, 128 by 128; MXFP8, e4m3 and e8m0, 1 by 32; MXFP4, e2m1 and e8m0, 1
    by 32; NVFP4, e2m1 and e4m3, 1 by 16, and a float32 scale for a whole matrix. e4m3 is float8_e4m3fn. uint8 holds
    e8m0, or two neighbouring e2m1 values of a row, the first in the lower half.

    A layer trains a stack that is a Parameter if it requires a gradient, and other stacks unless they are quantised.

    Args:
        gate_up: [S, 2I, H] float64, float32, bfloat16, float16 or e4m3, or [S, 2I, H / 2] of e2m1; I is the inner size.
        down: [S, H, I] or [S, H, I / 2].
        gate_up_bias: [S, 2I] or None; with quantised weights in any of the other dtypes, rounded to the rows'.
        down_bias: [S, H] or None.
        gate_up_scale: fp8 [S, 2, ceil(I / 128), ceil(H / 128)], the blocks of the first half of the rows (SwiGLU's
            gate), then of the second. Else [S, 2I, ceil(H / 32)] or [S, 2I, ceil(H / 16)].
        down_scale: [S, ceil(H / 128), ceil(I / 128)], [S, H, ceil(I / 32)] or [S, H, ceil(I / 16)].
        gate_up_scale_2: [S, 2] float32 of NVFP4, for the same halves of the rows. It multiplies, as ModelOpt's
            ``weight_scale_2``; compressed-tensors' ``weight_global_scale`` divides.
        down_scale_2: [S, 1] float32 of NVFP4.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    gate_up_scale_2: Tensor | None = None
    down_scale_2: Tensor | None = None

    def __post_init__(self) -> None:
        shape, dtype, device = self.down.shape, self.down.dtype, self.down.device
        if len(shape) != 3:
            raise ValueError(f"down must be [S, H, I], got {list(shape)}")
        if dtype not in (*DTYPES, FP8, BYTES):
            raise ValueError(
                f"down must be float64, float32, bfloat16, float16, float8_e4m3fn or uint8 of e2m1, got {dtype}"
            )
        if shape[1] % per_element(dtype):
            raise ValueError(f"down must have an even number of rows H in {dtype}, got {list(shape)}")
        known = {scale: form for (weight, scale), form in FORMATS.items() if weight == dtype}
        if known and self.format is None:
            names = " or ".join(f"{scale} ({form.name})" for scale, form in known.items())
            raise ValueError(
                f"down_scale must be {names} with down {_kind(self.down)}, got {_kind(self.down_scale)}"
            )
        wanted = self._wanted()
        for name in NAMES:
            sizes, dtypes = wanted.get(name, (None, ()))
            stack: Tensor | None = getattr(self, name)
            if stack is None and (sizes is None or name.endswith("_bias")):
                continue
            fits = stack is not None and list(stack.shape) == sizes
            if stack is None or not fits or stack.dtype not in dtypes or stack.device != device:
                kinds = " or ".join(map(str, dtypes))
                raise ValueError(
                    f"{name} must be {'None' if sizes is None else f'{sizes} {kinds} {device}'} with down "
                    f"{_kind(self.down)}, got {_kind(stack)}"
                )

    def _wanted(self) -> dict[str, SizesAndDtypes]:
        slots, hidden, inner = *self.down.shape[:2], self.intermediate
        form, dtype = self.format, self.down.dtype
        biases = (dtype,) if form is None else DTYPES
        return {
            "gate_up": ([slots, 2 * inner, hidden // per_element(dtype)], (dtype,)),
            "down": (list(self.down.shape), (dtype,)),
            "gate_up_bias": ([slots, 2 * inner], biases),
            "down_bias": ([slots, hidden], biases),
            **({} if form is None else scales_of(form, slots, hidden, inner)),
        }

    @property
    def format(self) -> Format | None:
        """Format of quantised weights, else None."""
        return None if self.down_scale is None else FORMATS.get((self.down.dtype, self.down_scale.dtype))

    @property
    def quantised(self) -> bool:
        """Whether the weights have scales."""
        return self.down.dtype not in DTYPES

    @property
    def intermediate(self) -> int:
        """I, the inner size."""
        return self.down.shape[2] * per_element(self.down.dtype)

    @property
    def num_slots(self) -> int:
        return self.down.shape[0]

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """Return a copy of a stack's rows, without gradients; None if there is no such stack."""
        stack: Tensor | None = getattr(self, name)
        return None if stack is None else stack.detach()[list(experts)]

    def trains(self, name: str) -> bool:
        """Return whether a stack's rows require gradients."""
        stack: Tensor | None = getattr(self, name)
        return stack.requires_grad if isinstance(stack, nn.Parameter) else not self.quantised

    def stacks(self) -> dict[str, Tensor]:
        """Return the stacks that are not None, by name."""
        return {name: stack for name in NAMES if (stack := getattr(self, name)) is not None}

    @staticmethod
    def random(
        num_slots: int,
        hidden: int,
        intermediate: int,
        *,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ExpertWeights:
        """Return weights drawn uniformly from +-1/sqrt(fan in), like nn.Linear."""

        def uniform(fan_in: int, *sizes: int) -> Tensor:
            tensor = torch.empty(sizes, dtype=dtype, device=device)
            return tensor.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)

        return ExpertWeights(
            uniform(hidden, num_slots, 2 * intermediate, hidden),
            uniform(intermediate, num_slots, hidden, intermediate),
            uniform(hidden, num_slots, 2 * intermediate) if bias else None,
            uniform(intermediate, num_slots, hidden) if bias else None,
        )


def _kind(stack: Tensor | None) -> str:
    return "None" if stack is None else f"{list(stack.shape)} {stack.dtype} {stack.device}"


@dataclass(frozen=True)
class BorrowedWeights(ExpertWeights):
    """Stacks that arrive while other weights are used: call `wait` before their use, in forward and in backward."""

    wait: Callable[[], object] = field(kw_only=True)


def describe(weights: ExpertWeights, first: int = 0) -> str:
    dtype, stacks = weights.down.dtype, weights.stacks().items()
    kinds = {name: "" if stack.dtype == dtype else f" {stack.dtype}" for name, stack in stacks}
    shapes = ", ".join(f"{name} {list(stack.shape[first:])}{kinds[name]}" for name, stack in stacks)
    return f"{shapes} {dtype} on {weights.down.device.type}"


def compute_path(weights: ExpertWeights, dtype: torch.dtype | None = None) -> Literal["grouped_mm", "loop"]:
    """Return the path of :func:`run_experts` for these weights and rows of a dtype; None: the weights'."""
    dtype = weights.down.dtype if dtype is None else dtype
    sizes = weights.down.shape[1], weights.intermediate
    aligned = all(size * dtype.itemsize % ROW_BYTES == 0 for size in sizes)
    dense = weights.quantised or all(
        s.is_contiguous() or s.transpose(1, 2).is_contiguous() for s in (weights.gate_up, weights.down)
    )
    # grouped_mm has no float64
    return "grouped_mm" if dtype != torch.float64 and aligned and dense else "loop"
