"""A small model of MoE layers with residuals, for stacks: its layers, and the dense model beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import isoload
from isoload.balancing.prediction import TokensPredictor
from isoload.layer.routers import Gate, Router
from isoload.transport import LocalTransport, Transport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU

HIDDEN, INNER, EXPERTS, TOP_K = 8, 6, 12, 3
TOKENS = (9, 0, 13, 4, 7, 1, 6, 11)  # per rank


class PastChoices(TokensPredictor):
    """Predicts a token's choices in the layer before; it needs those of two layers."""

    reads, num_experts = "choices", EXPERTS

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def depth_of(self, layer: int) -> int:
        return min(2, layer)

    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        return tokens[:, 0]


@dataclass
class Model:
    """L layers on R ranks: rows [T, H] of every rank -> rows + layer(rows), L times.

    The routing is skewed, and a token's choices in a layer are near those in the layer before, as in trained models.
    """

    ranks: int
    num_layers: int = 3
    slots: int = 0  # per rank beside the spare ones; 0 = as many as the experts need
    spare: int = 2
    num_shared: int = 0
    dtype: torch.dtype = torch.float64
    tokens: Sequence[int] = TOKENS
    alive: tuple[bool, ...] | None = None
    gates: list[Gate] = field(init=False)
    dense: list[ExpertWeights] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(17 * self.ranks + self.num_layers)
        self.topology = isoload.Topology(self.ranks, 2 if self.ranks % 2 == 0 else 0, alive=self.alive)
        common = torch.randn(EXPERTS, HIDDEN, generator=draw, dtype=torch.float64)
        total = EXPERTS + self.num_shared
        self.gates, self.dense = [], []
        for _ in range(self.num_layers):
            own = common + 0.3 * torch.randn(EXPERTS, HIDDEN, generator=draw, dtype=torch.float64)
            bias = torch.linspace(3, 0, EXPERTS, dtype=torch.float64).to(self.dtype)
            self.gates.append(Gate(Router(EXPERTS, TOP_K), own.to(self.dtype), bias).requires_grad_(False))
            stacks = ExpertWeights.random(total, HIDDEN, INNER, generator=draw, dtype=torch.float64)
            self.dense.append(ExpertWeights(*(s.to(self.dtype) for s in stacks.stacks().values())))
        size = (self.slots or -(-EXPERTS // self.ranks)) + self.num_shared + self.spare
        counts = torch.rand(self.num_layers, EXPERTS, generator=draw) ** 2
        self.placement = isoload.place(
            counts,
            self.topology,
            slots_per_rank=size,
            spare_slots=self.spare,
            num_shared=self.num_shared,
            placer="eplb" if self.slots else "trivial",
        )

    def rows(self, batch: int = 0) -> list[Tensor]:
        """[T, H] of every rank."""
        draw = torch.Generator().manual_seed(1000 + batch)
        return [
            torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64).to(self.dtype)
            for n in self.tokens[: self.ranks]
        ]

    def layers(self, transport: Transport | None = None, **how: Any) -> list[isoload.MoE]:
        transport = LocalTransport(self.topology) if transport is None else transport
        how = {"policy": "hedge", **how}
        return [
            isoload.MoE(gate, dense, transport, self.placement, layer=i, **how)
            for i, (gate, dense) in enumerate(zip(self.gates, self.dense, strict=True))
        ]

    def wanted(self, rows: Sequence[Tensor], part: slice = slice(None)) -> list[Tensor]:
        """What the dense model, or some layers of it, make of the rows."""
        done = list(rows)
        shared = torch.arange(EXPERTS, EXPERTS + self.num_shared)
        for gate, dense in zip(self.gates[part], self.dense[part], strict=True):
            for i, row in enumerate(done):
                ids, weights = gate(row)
                ids = torch.cat([ids, shared.expand(len(ids), -1)], dim=1)
                weights = torch.cat([weights, weights.new_ones(len(ids), self.num_shared)], dim=1)
                done[i] = row + run_experts(row, ids, weights, [dense], SwiGLU())
        return done


def run(layers: Sequence[isoload.MoE], rows: Sequence[Tensor], num_tokens: int | None = None) -> list[Tensor]:
    """The model by its layers; rows of the owned ranks."""
    done = list(rows)
    for layer in layers:
        done = [row + y for row, y in zip(done, layer(done, num_tokens), strict=True)]
    return done


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether no element is off by more than the tolerance of the largest."""
    if got.shape != want.shape:
        return False
    scale = max(float(want.abs().max()), 1e-30) if want.numel() else 1.0
    return not got.numel() or float((got.double() - want.double()).abs().max()) <= tolerance * scale


def routing_trace(num_layers: int) -> isoload.traces.Trace:
    """Choices of random tokens, for predictors that are fitted."""
    model, rows = Model(1, num_layers), Model(1, num_layers, tokens=(200,)).rows(99)[0]
    ids = [gate(rows)[0] for gate in model.gates]
    return isoload.traces.Trace("made", EXPERTS, topk_ids=torch.stack(ids, 1).int().numpy())
