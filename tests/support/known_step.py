"""A training step whose routes are known: ids of every micro-batch, rank and layer, and the dense layer's results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import isoload
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU

RANKS, LAYERS, EXPERTS, K, HIDDEN = 4, 2, 16, 3, 8
TOKENS = ((9, 0, 14, 5), (3, 11, 1, 8))  # [micro-batches][ranks]
STACKS = ("gate_up", "down")


@dataclass
class Step:
    ids: list[list[Tensor]]  # [micro-batches][ranks] of [T, L, K]
    placement: isoload.Placement
    dense: list[ExpertWeights]  # of every layer

    def rows(self, batch: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(batch)
        return [
            torch.randn(len(ids), HIDDEN, generator=draw, dtype=torch.float64, requires_grad=True)
            for ids in self.ids[batch]
        ]

    def gates(self, batch: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(100 + batch)
        return [
            torch.rand(len(ids), K, generator=draw, dtype=torch.float64, requires_grad=True)
            for ids in self.ids[batch]
        ]

    def layer_ids(self, batch: int, layer: int) -> list[Tensor]:
        return [ids[:, layer] for ids in self.ids[batch]]

    def dense_run(self, batch: int, layer: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs; gradients of rows, of gates and of the stacks, for the loss sum(y ** 2)."""
        rows, gates = self.rows(batch), self.gates(batch)
        stacks = [getattr(self.dense[layer], name).clone().requires_grad_() for name in STACKS]
        group = ExpertWeights(*stacks)
        ids = self.layer_ids(batch, layer)
        ys = [
            run_experts(row, of_rank, gate, [group], SwiGLU())
            for row, of_rank, gate in zip(rows, ids, gates, strict=True)
        ]
        torch.cat(ys).square().sum().backward()
        return ys, [leaf.grad for leaf in (*rows, *gates, *stacks)]


def make_step(
    repeats: bool = False,
    spare: int = 2,
    replicas: int = 1,
    num_shared: int = 0,
    seed: int = 0,
    layers: int = LAYERS,
) -> Step:
    """Skewed choices with masked copies and a masked row; repeats: tokens choose experts twice."""
    draw = torch.Generator().manual_seed(seed)
    popular = torch.linspace(3, 0, EXPERTS).exp()
    ids = []
    for sizes in TOKENS:
        of_ranks = []
        for size in sizes:
            chosen = torch.multinomial(popular.expand(max(size, 1) * layers, -1), K, repeats, generator=draw)
            rows = chosen.view(-1, layers, K)[:size]
            rows[torch.rand(rows.shape, generator=draw) < 0.1] = -1
            rows[-1:] = -1
            of_ranks.append(rows)
        ids.append(of_ranks)
    topology = isoload.Topology(RANKS, 2)
    placement = isoload.place(
        popular.expand(layers, -1) ** torch.linspace(1, 0.5, layers).unsqueeze(1),
        topology,
        slots_per_rank=EXPERTS // RANKS + replicas + num_shared + spare,
        spare_slots=spare,
        num_shared=num_shared,
        placer="eplb" if replicas else "trivial",
    )
    experts = EXPERTS + num_shared
    dense = [
        ExpertWeights.random(experts, HIDDEN, HIDDEN, generator=draw, dtype=torch.float64)
        for _ in range(layers)
    ]
    return Step(ids, placement, dense)
