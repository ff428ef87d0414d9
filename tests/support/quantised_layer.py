"""Layers on virtual ranks with quantised experts, for tests: their experts, rows and gate, and what is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.weights.experts import ExpertWeights
from support.quantised_experts import NAMES, random_quantised
from support.small_layer import TOKENS, make_gate

EXPERTS, HIDDEN, INNER = 11, 200, 136  # no block divides these sizes
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def experts(name: str = "fp8", seed: int = 3, num: int = EXPERTS, **sizes: int) -> ExpertWeights:
    sizes = {"hidden": HIDDEN, "intermediate": INNER, **sizes}
    return random_quantised(name, num, **sizes, seed=seed)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    kinds = (a.dtype, a.shape) == (b.dtype, b.shape)
    return kinds and torch.equal(*(s.contiguous().view(-1).view(torch.uint8) for s in (a, b)))


def assert_bytes(layer: isoload.MoE, weights: ExpertWeights) -> None:
    """Every row of every rank is its expert's, to the byte."""
    for own in layer.weights:
        assert own.stored().keys() == weights.stacks().keys()
        for stack, stored in own.stored().items():
            for row, expert in zip(stored, own.layout.experts, strict=False):
                assert same_bytes(row, getattr(weights, stack)[expert]), stack


def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of small_layer's, which has rows of its own width."""
    return make_gate(3, masked=True, dtype=torch.float32)(rows[:, :8])


def place(ranks: int, seed: int, spare: int = 0) -> isoload.Placement:
    counts = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(seed)) ** 3
    size = min(-(-EXPERTS // ranks) + 1, EXPERTS) + spare
    return isoload.place(counts, isoload.Topology(ranks), slots_per_rank=size, spare_slots=spare)


def draw_rows(ranks: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(8)
    return [torch.randn(n, HIDDEN, generator=draw).to(dtype) for n in TOKENS[:ranks]]


def virtual(weights: ExpertWeights, placement: isoload.Placement, **how: Any) -> isoload.MoE:
    return isoload.MoE(gate, weights, isoload.LocalTransport(placement.topology), placement, **how)


@torch.no_grad()
def assert_same(layer: isoload.MoE, other: isoload.MoE, rows: list[Tensor]) -> None:
    got, want = layer(rows), other(rows)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))
    assert any(y.any() for y in got)
