"""A fuzzed layer against the dense one: outputs and gradients, a step of training, a move to another placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

import isoload
from isoload.transport import LocalTransport, Transport
from support.fuzz_cases import FuzzCase

HIDDEN, INNER, RATE = 4, 3, 0.1
TOLERANCE = 1e-9  # float64, where sums run in another order


class Dense:
    """All experts on every row, then the chosen ones: no slots, no ranks, none of isoload's code."""

    def __init__(self, case: FuzzCase) -> None:
        draw = torch.Generator().manual_seed(case.seed)
        self.case, experts = case, case.placement.num_experts
        self.gate_up = torch.randn(
            experts, 2 * INNER, HIDDEN, generator=draw, dtype=torch.float64
        ).requires_grad_()
        self.down = torch.randn(experts, HIDDEN, INNER, generator=draw, dtype=torch.float64).requires_grad_()
        self.router = torch.randn(case.ids[0].shape[1], HIDDEN, generator=draw, dtype=torch.float64)
        self.rows = [torch.randn(len(i), HIDDEN, generator=draw, dtype=torch.float64) for i in case.ids]

    def weights(self, rows: Tensor) -> Tensor:
        return (rows @ self.router.T).softmax(-1)

    def __call__(self, rank: int, rows: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eih->tei", rows, self.gate_up).chunk(2, dim=-1)
        each = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.down)
        ids, weights = self.case.full_ids()[rank], self.weights(rows)
        shared = ids.shape[1] - weights.shape[1]
        weights = torch.cat([weights, weights.new_ones(len(rows), shared)], 1) * (ids >= 0)
        chosen = each.gather(1, ids.clamp(min=0).unsqueeze(-1).expand(-1, -1, HIDDEN))
        return (chosen * weights.unsqueeze(-1)).sum(1)

    def layer(self, transport: Transport) -> isoload.MoE:
        """isoload's, on the same weights and choices."""
        answers = itertools.cycle([self.case.ids[rank] for rank in transport.group.ranks])
        return isoload.MoE(
            lambda rows: (next(answers), self.weights(rows)),
            isoload.ExpertWeights(self.gate_up.detach().clone(), self.down.detach().clone()),
            transport,
            self.case.placement,
            self.case.layer,
            self.case.policy,
            min_tokens=10**6 if self.case.seed % 7 == 0 else 0,
            weight_rows=self.case.placement.slots_per_rank,
            **self.case.options,
        )


def check_layer(case: FuzzCase) -> None:
    """All ranks in one process."""
    follow(case, Dense(case), LocalTransport(case.topology))


def follow(case: FuzzCase, dense: Dense, transport: Transport) -> None:
    """Two batches with a step between, the layer moved, a batch on the new placement; a process checks its ranks."""
    layer = dense.layer(transport)
    for move in (False, False, True):
        if move:
            layer.load_placement(case.after, optimizer="none")
        batch(dense, layer, transport.group.ranks)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= RATE * (0 if parameter.grad is None else parameter.grad)
                parameter.grad = None
            for stack in (dense.gate_up, dense.down):
                stack -= RATE * stack.grad
                stack.grad = None
        layer.refresh_replicas()


def batch(dense: Dense, layer: isoload.MoE, ranks: Iterable[int]) -> None:
    """Forward and backward of both. Losses of all ranks add up, so a process computes all of the dense layer."""
    mine = {rank: dense.rows[rank].clone().requires_grad_() for rank in ranks}
    outputs = layer(list(mine.values()))
    sum((y**2).sum() for y in outputs).backward()
    twins = [rows.clone().requires_grad_() for rows in dense.rows]
    wanted = [dense(rank, rows) for rank, rows in enumerate(twins)]
    sum((y**2).sum() for y in wanted).backward()
    for rank, output in zip(mine, outputs, strict=True):
        compare(f"output of rank {rank}", output, wanted[rank])
        compare(f"gradient of rank {rank}'s rows", mine[rank].grad, twins[rank].grad)
    for rank, weights in zip(mine, layer.weights, strict=True):
        homes = list(weights.layout.homes)
        for name in ("gate_up", "down") if homes else ():
            own, stack = getattr(weights, name), getattr(dense, name)
            compare(f"{name} of rank {rank}", own, stack[homes])
            compare(f"gradient of {name} of rank {rank}", own.grad, stack.grad[homes])


def compare(what: str, got: Tensor | None, want: Tensor | None) -> None:
    """Equal up to the order of sums; no gradient counts as zeros."""
    if got is None and want is None:
        return
    got = torch.zeros_like(want) if got is None else got.detach()
    want = torch.zeros_like(got) if want is None else want.detach()
    assert got.shape == want.shape, (
        f"{what} has shape {list(got.shape)}, the dense layer's {list(want.shape)}"
    )
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    error = float((got - want).abs().max()) if want.numel() else 0.0
    assert error <= TOLERANCE * scale, f"{what} is off by {error:.3g} of {scale:.3g}"
