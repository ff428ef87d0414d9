"""ExpertWeights: the stacked weights of some slots, the activations between them, and how they are multiplied.

Shapes: S slots, H width of a row, I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isoload.experts.fp8 import FP8, scale_shapes

NAMES = ("gate_up", "down", "gate_up_bias", "down_bias", "gate_up_scale", "down_scale")  # of all stacks
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROW_BYTES = 16  # grouped_mm refuses matrices whose rows do not start at multiples of this


@dataclass(frozen=True)
class SwiGLU:
    """``silu(gate) * up``; gate is the first half of the projection, up the second."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2I] -> [..., I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


@dataclass(frozen=True)
class ClampedGLU:
    """gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``; gate is at even places (<= limit), up at odd (within
    +-limit)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2I] -> [..., I]."""
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


Activation = SwiGLU | ClampedGLU


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of S slots, stacked. A row is one output, as in nn.Linear, so checkpoints need no transposing.

    In fp8 (inference only, without biases) every 128x128 block of a matrix has a scale, which multiplies its values.

    Parameters among them say whether a layer trains what it makes of them; of other stacks it does, unless in fp8.

    Args:
        gate_up: [S, 2I, H] float64, float32, bfloat16, float16, or float8_e4m3fn.
        down: [S, H, I].
        gate_up_bias: [S, 2I] or None.
        down_bias: [S, H] or None.
        gate_up_scale: [S, 2, ceil(I / 128), ceil(H / 128)] float32 beside fp8: the gate's blocks, then those of up.
        down_scale: [S, ceil(H / 128), ceil(I / 128)] float32 beside fp8.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.down.shape
        if len(shape) != 3:
            raise ValueError(f"down must be [S, H, I], got {list(shape)}")
        slots, hidden, inner = shape
        if self.down.dtype not in (*DTYPES, FP8):
            raise ValueError(
                f"down must be float64, float32, bfloat16, float16 or float8_e4m3fn, got {self.down.dtype}"
            )
        self._check_kinds()
        expected = {
            "gate_up": [slots, 2 * inner, hidden],
            "gate_up_bias": [slots, 2 * inner],
            "down_bias": [slots, hidden],
            **scale_shapes(slots, hidden, inner),
        }
        for name, sizes in expected.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if list(tensor.shape) != sizes:
                raise ValueError(
                    f"{name} must be {sizes} beside down {list(shape)}, got {list(tensor.shape)}"
                )
            dtype = torch.float32 if name.endswith("_scale") else self.down.dtype
            if (tensor.dtype, tensor.device) != (dtype, self.down.device):
                of = "be" if name.endswith("_scale") else "have down's dtype and device"
                raise ValueError(
                    f"{name} must {of} ({dtype}, {self.down.device}), got {tensor.dtype}, {tensor.device}"
                )

    def _check_kinds(self) -> None:
        """Raises ValueError for stacks that do not go together: scales belong to fp8, biases to all else."""
        for name in ("gate_up_scale", "down_scale"):
            if (getattr(self, name) is not None) != self.in_fp8:
                rule = "be there" if self.in_fp8 else "be None"
                raise ValueError(f"{name} must {rule} beside down {self.down.dtype}, got {_kind(self, name)}")
        for name in ("gate_up_bias", "down_bias"):
            if self.in_fp8 and getattr(self, name) is not None:
                raise ValueError(f"{name} must be None beside weights in fp8, got {_kind(self, name)}")

    @property
    def in_fp8(self) -> bool:
        """Whether the weights are e4m3 with scales."""
        return self.down.dtype == FP8

    @property
    def num_slots(self) -> int:
        return self.down.shape[0]

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """A copy of a stack's rows, without gradients; None where there is no such stack."""
        stack: Tensor | None = getattr(self, name)
        return None if stack is None else stack.detach()[list(experts)]

    def trains(self, name: str) -> bool:
        """Whether a stack's rows are to require gradients."""
        stack: Tensor | None = getattr(self, name)
        return stack.requires_grad if isinstance(stack, nn.Parameter) else not self.in_fp8

    def stacks(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
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
        """Uniform in +-1/sqrt(fan in), like nn.Linear."""

        def uniform(fan_in: int, *sizes: int) -> Tensor:
            tensor = torch.empty(sizes, dtype=dtype, device=device)
            return tensor.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)

        return ExpertWeights(
            uniform(hidden, num_slots, 2 * intermediate, hidden),
            uniform(intermediate, num_slots, hidden, intermediate),
            uniform(hidden, num_slots, 2 * intermediate) if bias else None,
            uniform(intermediate, num_slots, hidden) if bias else None,
        )


def _kind(weights: ExpertWeights, name: str) -> str:
    """A stack's shape and dtype, for messages."""
    stack: Tensor | None = getattr(weights, name)
    return "None" if stack is None else f"{list(stack.shape)} {stack.dtype}"


def _there() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True)
class BorrowedWeights(ExpertWeights):
    """Stacks that arrive while others are computed, in memory that may hold other weights by the time of backward.

    Args:
        wait: returns once the weights are there: called before they are used, in forward and in backward, which
            reads the same memory. So nothing that is computed from them saves them.
    """

    wait: Callable[[], None] = _there


def describe(weights: ExpertWeights, first: int = 0) -> str:
    """Shapes from a dimension on, dtype and kind of device, for messages and comparisons."""
    shapes = ", ".join(f"{name} {list(stack.shape[first:])}" for name, stack in weights.stacks().items())
    return f"{shapes} {weights.down.dtype} on {weights.down.device.type}"


def compute_path(weights: ExpertWeights, dtype: torch.dtype | None = None) -> Literal["grouped_mm", "loop"]:
    """Which path :func:`run_experts` takes for these weights: by dtype and layout alone.

    dtype: of the rows, in which weights in fp8 are multiplied; None: the weights'.
    """
    dtype = weights.down.dtype if dtype is None else dtype
    aligned = all(size * dtype.itemsize % ROW_BYTES == 0 for size in weights.down.shape[1:])
    dense = all(
        s.is_contiguous() or s.transpose(1, 2).is_contiguous() for s in (weights.gate_up, weights.down)
    )
    return "grouped_mm" if dtype != torch.float64 and aligned and dense else "loop"  # it has no float64
