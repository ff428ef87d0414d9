"""A layer that borrows on made routing, for tests: its setup, and the dense layer beside it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import isoload
from isoload.transport import LocalTransport, Transport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU
from support.made_routing import make_workload

HIDDEN, INNER, TOP_K = 8, 8, 3
STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
LLEP = {"policy": "llep", "min_chunk": 1, "threshold": 1.0}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass
class Setup:
    """One batch on R ranks: ids [R][T, K], rows [R][T, H], a placement with spare slots, the dense weights."""

    ids: list[Tensor]
    rows: list[Tensor]
    placement: isoload.Placement
    dense: ExpertWeights

    def __post_init__(self) -> None:
        self.router = torch.randn(
            self.dense.down.shape[1], TOP_K, generator=torch.Generator().manual_seed(7)
        ).double()

    @property
    def num_ranks(self) -> int:
        return len(self.ids)

    def weights(self, rows: Tensor) -> Tensor:
        weights = (rows.double() @ self.router.to(rows.device)).softmax(-1)
        return weights if rows.dtype == torch.float64 else weights.float()

    def layer(self, transport: Transport | None = None, **how: Any) -> isoload.MoE:
        """The layer over a transport (default: virtual ranks); the gate answers for one owned rank after the other."""
        transport = LocalTransport(self.placement.topology) if transport is None else transport
        answers = itertools.cycle([self.ids[rank] for rank in transport.group.ranks])

        def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
            return next(answers), self.weights(rows)

        return isoload.MoE(gate, self.dense, transport, self.placement, **how)

    def to(self, device: str) -> Setup:
        """The same batch and weights on a device."""
        stacks = (getattr(self.dense, name) for name in STACKS)
        dense = ExpertWeights(*(None if stack is None else stack.to(device) for stack in stacks))
        ids, rows = ([tensor.to(device) for tensor in tensors] for tensors in (self.ids, self.rows))
        return Setup(ids, rows, self.placement, dense)

    def leaves(self) -> list[Tensor]:
        return [r.clone().requires_grad_() for r in self.rows]

    def dense_run(
        self, dtype: torch.dtype = torch.float64
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """Outputs, gradients of the rows, and of the stacks, for the loss sum(y ** 2)."""
        stacks = [getattr(self.dense, name) for name in STACKS]
        stacks = [None if s is None else s.to(dtype).clone().requires_grad_() for s in stacks]
        rows = [r.to(dtype).clone().requires_grad_() for r in self.rows]
        group = ExpertWeights(*stacks)
        ys = [
            run_experts(r, ids, self.weights(r), [group], SwiGLU())
            for r, ids in zip(rows, self.ids, strict=True)
        ]
        torch.cat(ys).square().sum().backward()
        zeros = [torch.zeros_like(r) if r.grad is None else r.grad for r in rows]
        return ys, zeros, [None if s is None else s.grad for s in stacks]


def make_setup(
    ranks: int,
    workload: str = "hot_rank",
    *,
    experts: int = 16,
    slots: int = 0,
    spare: int = 2,
    tokens: Any = (13, 0, 7, 9, 1, 12, 5, 8),
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    hidden: int = HIDDEN,
    seed: int = 0,
    **options: Any,
) -> Setup:
    made = make_workload(
        workload,
        num_ranks=ranks,
        num_experts=experts,
        top_k=TOP_K,
        tokens_per_rank=tokens[:ranks] if isinstance(tokens, tuple) else tokens,
        seed=seed,
        **options,
    )
    draw = torch.Generator().manual_seed(seed)
    topology = isoload.Topology(ranks, 2 if ranks % 2 == 0 else 0)
    size = (slots or -(-experts // ranks)) + spare
    placement = isoload.place(
        torch.ones(1, experts), topology, slots_per_rank=size, spare_slots=spare, placer="trivial"
    )
    dense = ExpertWeights.random(experts, hidden, INNER, bias=bias, generator=draw, dtype=dtype)
    ids = made.topk_ids(0)
    rows = [torch.randn(len(i), hidden, generator=draw, dtype=torch.float64).to(dtype) for i in ids]
    return Setup(ids, rows, placement, dense)


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether no element is off by more than the tolerance of the largest."""
    if got.shape != want.shape:
        return False
    scale = max(float(want.detach().abs().max()), 1e-30) if want.numel() else 1.0
    return not got.numel() or float((got.detach().double() - want.detach()).abs().max()) <= tolerance * scale


def assert_dense(setup: Setup, layer: isoload.MoE) -> list[Tensor]:
    """Forward and all gradients of the layer over virtual ranks equal the dense layer's. Returns all of them."""
    dtype = setup.rows[0].dtype
    bound = TOLERANCE[dtype]
    rows = setup.leaves()
    ys = layer(rows)
    assert isinstance(ys, list)
    torch.cat([y.double() for y in ys]).square().sum().backward()
    wanted, row_grads, stack_grads = setup.dense_run()
    for got, want in zip(ys, wanted, strict=True):
        assert got.dtype == dtype and close(got, want, bound)
    for row, want in zip(rows, row_grads, strict=True):
        assert row.grad is not None and close(row.grad, want, 4 * bound)
    for held in layer.weights:
        homes = list(held.layout.homes)
        for name, grad in zip(STACKS, stack_grads, strict=True):
            if grad is not None:
                assert close(getattr(held, name).grad, grad[homes], 4 * bound), name
    return [*(y.detach() for y in ys), *(r.grad for r in rows), *(p.grad for p in layer.parameters())]
