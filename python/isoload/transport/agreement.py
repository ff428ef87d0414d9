"""Codes for the stage in which a rank failed, and the errors of ranks that failed or differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from isoload.placement.placement import Placement
from isoload.wording import not_one_of

STAGE_BYTES = 40  # of a stage's name, where ranks tell each other
STAGES = ("count", "plan", "route", "dispatch", "experts", "combine", "placement")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def error_code(stage: str) -> int:
    """The number by which ``gather_loads`` tells all ranks that one failed in a stage."""
    if stage not in STAGES:
        raise ValueError(not_one_of("stage", STAGES, stage))
    return STAGES.index(stage) + 1


def raise_failure(codes: Sequence[int]) -> None:
    """Raises for the first rank whose code [R] is not 0: the same error on every rank that sees the same codes."""
    for rank, code in enumerate(codes):
        if code:
            stage = STAGES[code - 1] if 1 <= code <= len(STAGES) else f"of code {code}"
            raise ValueError(rank_failed(rank, stage))


@torch.library.custom_op("isoload::loads_of", mutates_args=())
def loads_of(loads: Tensor, first: Tensor) -> Tensor:
    """The loads [R, E] if no rank failed, as the first counts [R] of all ranks tell: minus a code; else raises.

    An op of its own, so that compiled code on CPU reads them when it runs and not when it is traced.
    """
    raise_failure([max(-count, 0) for count in first.tolist()])
    return loads.clone()


@loads_of.register_fake
def _(loads: Tensor, first: Tensor) -> Tensor:
    return loads.new_empty(loads.shape)


def rank_failed(rank: int, stage: str) -> str:
    return f"rank {rank} failed in stage {stage}, so all ranks stop; its own error says why"


def raise_unlike(name: str, values: Sequence[object], first: int = 0, why: str = "") -> None:
    """Raises ValueError if the values of the ranks from first on differ, naming the first rank that does."""
    for rank, value in enumerate(values, first):
        if value != values[0]:
            raise ValueError(
                f"{name} must be the same on all ranks, got {values[0]} on rank {first} and {value} on rank {rank}{why}"
            )


def raise_disagreement(names: Sequence[str], facts: Sequence[Sequence[int]], first: int = 0) -> None:
    """:func:`raise_unlike` for facts [n][F]; "dtype ..." is an index of DTYPES."""
    for name, values in zip(names, zip(*facts, strict=True), strict=True):
        if len(set(values)) > 1:
            raise_unlike(name, [DTYPES[v] for v in values] if name.startswith("dtype") else values, first)


def stage_header(stage: str, row_bytes: int) -> Tensor:
    """[STAGE_BYTES + 8] uint8: an exchange's stage and the bytes of its rows."""
    text = stage.encode()[:STAGE_BYTES].ljust(STAGE_BYTES, b"\0")
    return torch.frombuffer(bytearray(text + row_bytes.to_bytes(8, "little")), dtype=torch.uint8)


def raise_other_stage(headers: Tensor, first: int = 0) -> None:
    """Raises if stage_header [n, :] of the ranks from first on differ: other methods were called, or another order."""
    rows = [bytes(row) for row in headers.tolist()]
    stages = [row[:STAGE_BYTES].rstrip(b"\0").decode(errors="replace") for row in rows]
    sizes = [int.from_bytes(row[STAGE_BYTES:], "little") for row in rows]
    why = ": all ranks make the same calls in the same order"
    raise_unlike("stage", stages, first, why)
    raise_unlike(f"bytes per row of stage {stages[0]}", sizes, first, why)


def checksum(value: object) -> int:
    """56 bits that are the same on every machine for equal lists of numbers and strings."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def placement_facts(placement: Placement, layer: int) -> dict[str, int]:
    """What all ranks must hold alike of one layer."""
    slots, homes = placement.arrays
    weight = placement.weight_array
    held = {
        "slot_to_expert": slots[layer].tolist(),
        "home_slot": homes[layer].tolist(),
        "replica_weight": None if weight is None else weight[layer].tolist(),
    }
    return {f"checksum of {name}": checksum(value) for name, value in held.items()}
