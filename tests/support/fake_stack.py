"""A LibraStack on fake CUDA tensors, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import isoload
from isoload.layer.stack import LibraStack
from isoload.transport import Transport
from isoload.weights.experts import ExpertWeights
from support.fake_ranks import EXPERTS, HIDDEN, TOKENS, Everything, answer, gate, kept_memos
from support.host_waits import HostWaits
from support.stream_order import StreamOrder

LAYERS = 2


@dataclass
class FakeStack:
    host: HostWaits
    order: StreamOrder
    layers: list[isoload.MoE]
    stack: LibraStack
    rows: list[Tensor]

    def batch(self) -> None:
        rows = self.rows
        for layer in self.layers:
            rows = [row + y for row, y in zip(rows, layer(rows), strict=True)]


@contextmanager
def fake_stack(
    transport: Transport, predict: str | None, local: str, policy: str, borrow: str, batches: int = 1
) -> Iterator[FakeStack]:
    """After so many batches: two make all tables."""
    group, dtype = transport.group, torch.bfloat16
    slots = EXPERTS // group.topology.num_ranks + 2
    placement = isoload.place(
        torch.ones(LAYERS, EXPERTS), group.topology, slots_per_rank=slots, spare_slots=2, placer="trivial"
    )
    group._agreed = Everything()
    with HostWaits(answer) as host, torch.no_grad(), kept_memos():
        dense = ExpertWeights(
            *(torch.zeros(EXPERTS, n * HIDDEN, HIDDEN, dtype=dtype, device="cuda") for n in (2, 1))
        )
        layers = [
            isoload.MoE(gate, dense, transport, placement, layer=i, policy=policy, borrow=borrow)
            for i in range(LAYERS)
        ]
        for layer in layers:
            layer.balancer._own[dense.down.device] = layer.balancer.placed_on(dense.down.device)
        stack = LibraStack(layers, predict, local=local)
        rows = [torch.zeros(TOKENS[r], HIDDEN, dtype=dtype, device="cuda") for r in group.ranks]
        with StreamOrder(host) as order:
            made = FakeStack(host, order, layers, stack, rows)
            for _ in range(batches):
                made.batch()
            yield made
