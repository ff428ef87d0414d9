"""Dispatch's arguments: their checks, and the facts that every rank must give alike."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.transport.agreement import DTYPES
from isoload.value_checks import values_readable

# In the order of dispatch_facts
FACTS = ("hidden size of x", "dtype of x", "top-k of slots", "dtype of weights", "slots_per_rank")


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


def check_like(
    name: str, rank: int, given: Tensor, shape: torch.Size, dtype: torch.dtype, whose: str
) -> None:
    """Raises ValueError unless a rank's rows have the shape and dtype of others."""
    if given.shape != shape or given.dtype != dtype:
        raise ValueError(
            f"{name} of rank {rank} must be {list(shape)} {dtype} as {whose}, got {list(given.shape)} {given.dtype}"
        )
