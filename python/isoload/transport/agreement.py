"""What the ranks must agree on, how one rank's failure is told to all, and the checks of dispatch's arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isoload.value_checks import values_readable

STAGES = ("count", "plan", "route", "dispatch", "experts", "combine", "placement")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What every rank must give dispatch alike, in the order of dispatch_facts
FACTS = ("hidden size of x", "dtype of x", "top-k of slots", "dtype of weights", "slots_per_rank")


def error_code(stage: str) -> int:
    """The number by which ``gather_loads`` tells all ranks that one failed in a stage."""
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    return STAGES.index(stage) + 1


def raise_failure(codes: Sequence[int]) -> None:
    """Raises for the first rank whose code [R] is not 0: the same error on every rank that sees the same codes."""
    for rank, code in enumerate(codes):
        if code:
            stage = STAGES[code - 1] if 1 <= code <= len(STAGES) else f"of code {code}"
            raise ValueError(rank_failed(rank, stage))


def rank_failed(rank: int, stage: str) -> str:
    return f"rank {rank} failed in stage {stage}, so all ranks stop; its own error says why"


def raise_disagreement(names: Sequence[str], facts: Sequence[Sequence[int]]) -> None:
    """Raises if the ranks' facts [R][F] differ, naming the first fact that does."""
    for name, values in zip(names, zip(*facts, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = (DTYPES[v] if name.startswith("dtype") else v for v in (values[0], value))
                raise ValueError(
                    f"{name} must be the same on all ranks, got {first} on rank 0 and {other} on rank {rank}"
                )


def dispatch_facts(
    rank: int, x: Tensor, slots: Tensor, weights: Tensor, slots_per_rank: int, num_ranks: int
) -> tuple[int, ...]:
    """FACTS of one rank's arguments.

    Raises:
        ValueError: naming the argument, the rule and the value. Where slots' values are not readable, one
            out of range is an absent copy.
    """
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"x of rank {rank} must be [T, H] of {', '.join(map(str, DTYPES))}, got {list(x.shape)} {x.dtype}"
        )
    if slots.dim() != 2 or len(slots) != len(x) or not slots.shape[1]:
        raise ValueError(f"slots of rank {rank} must be [{len(x)}, K], K >= 1, got {list(slots.shape)}")
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots of rank {rank} must be int32 or int64, got {slots.dtype}")
    if weights.shape != slots.shape:
        raise ValueError(
            f"weights of rank {rank} must be {list(slots.shape)} as slots, got {list(weights.shape)}"
        )
    if weights.dtype not in (torch.float32, torch.promote_types(torch.float32, x.dtype)):
        raise ValueError(
            f"weights of rank {rank} must be float32 (or float64 beside float64 x), got {weights.dtype}"
        )
    if not x.device == slots.device == weights.device:
        raise ValueError(
            f"x, slots and weights of rank {rank} must be on one device, "
            f"got {x.device}, {slots.device}, {weights.device}"
        )
    if slots_per_rank < 1:
        raise ValueError(f"slots_per_rank must be at least 1, got {slots_per_rank}")
    if values_readable(slots):
        last = num_ranks * slots_per_rank - 1
        if (wrong := slots[(slots < -1) | (slots > last)]).numel():
            raise ValueError(f"slots of rank {rank} must be in -1..{last}, got {int(wrong[0])}")
    return (
        x.shape[1],
        DTYPES.index(x.dtype),
        slots.shape[1],
        DTYPES.index(weights.dtype),
        slots_per_rank,
    )
