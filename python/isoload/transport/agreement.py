"""Codes for the stage in which a rank failed, and the errors of ranks that failed or differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

STAGES = ("count", "plan", "route", "dispatch", "experts", "combine", "placement")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    """Raises if the ranks' facts [R][F] differ, naming the first fact that does; "dtype ..." is an index of DTYPES."""
    for name, values in zip(names, zip(*facts, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = (DTYPES[v] if name.startswith("dtype") else v for v in (values[0], value))
                raise ValueError(
                    f"{name} must be the same on all ranks, got {first} on rank 0 and {other} on rank {rank}"
                )


def checksum(value: object) -> int:
    """56 bits that are the same on every machine for equal lists of numbers and strings."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
