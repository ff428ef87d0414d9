"""Layers on a GPU beside the same layers on the CPU, for tests: their steps, and processes that share one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import isoload
from isoload.transport import CollectiveTransport, Transport
from isoload.weights.experts import ExpertWeights
from support.borrowed_layer import LLEP
from support.borrowed_layer import make_setup as make_borrowing_setup
from support.small_layer import STACKS, close

DEVICE = "cuda"
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2}


def make_layer(setup: SimpleNamespace, device: str, transport: Transport, **how: Any) -> isoload.MoE:
    """The setup's layer with its weights on a device. Its gate computes on the CPU: both choose alike."""

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = setup.gate(rows.cpu())
        return ids.to(device), weights.to(device)

    stacks = (getattr(setup.dense, name) for name in STACKS)
    dense = ExpertWeights(*(None if stack is None else stack.to(device) for stack in stacks))
    return isoload.MoE(gate, dense, transport, setup.placement, **how)


def make_skewed(experts: int, hidden: int, inner: int, top_k: int) -> tuple[Any, ExpertWeights]:
    """A gate that prefers the first experts, and bfloat16 experts, on the GPU: neither makes the host wait."""
    draw = torch.Generator().manual_seed(3)
    router = torch.randn(experts, hidden, generator=draw).to(DEVICE)
    skew = torch.linspace(4, 0, experts).to(DEVICE)
    dense = ExpertWeights.random(experts, hidden, inner, generator=draw, dtype=torch.bfloat16)

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (rows.float() @ router.T + skew).softmax(-1).topk(top_k)
        return ids, weights

    return gate, ExpertWeights(dense.gate_up.to(DEVICE), dense.down.to(DEVICE), None, None)


def train(layer: nn.Module, rows: list[Tensor]) -> list[Tensor | None]:
    """Outputs and all gradients of one step, on the CPU."""
    rows = [row.clone().requires_grad_() for row in rows]
    outputs = layer(rows)
    sum((y.double() ** 2).sum() for y in outputs).backward()
    grads = [leaf.grad for leaf in (*rows, *layer.parameters())]
    return [None if t is None else t.detach().cpu() for t in (*outputs, *grads)]


def assert_close(mine: list[Tensor | None], theirs: list[Tensor | None], dtype: torch.dtype) -> None:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a is None) == (b is None), i
        assert a is None or b is None or close(a, b.double(), TOLERANCE[dtype]), i


def in_processes(
    body: Callable[[int, int], Any], ranks: int, folder: Path, own_gpus: bool = False
) -> list[Any]:
    """What ``body(rank, ranks)`` returned in fresh processes of one group: forked processes cannot use CUDA.

    The group is of gloo, and the processes share a GPU. With own_gpus each has a GPU, and NCCL joins these.
    """
    torch.multiprocessing.spawn(_process, (body, ranks, str(folder), own_gpus), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _process(rank: int, body: Callable[[int, int], Any], ranks: int, folder: str, own_gpus: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    if own_gpus:
        torch.cuda.set_device(rank)
    backend, limit = "cpu:gloo,cuda:nccl" if own_gpus else "gloo", timedelta(seconds=40)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    torch.save(body(rank, ranks), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def borrow_one(rank: int, ranks: int, backend: str) -> list[Tensor | None]:
    setup = make_borrowing_setup(ranks).to(DEVICE)
    transport = CollectiveTransport(setup.placement.topology)
    return train(setup.layer(transport, **LLEP, borrow=backend), [setup.rows[rank]])


def check_borrowing_processes(backend: str, folder: Path) -> None:
    ranks = 2
    setup = make_borrowing_setup(ranks)
    layer = setup.layer(**LLEP)
    whole = train(layer, setup.rows)
    sizes = [len(list(weights.parameters())) for weights in layer.weights]
    for rank, mine in enumerate(in_processes(partial(borrow_one, backend=backend), ranks, folder)):
        first = 2 * ranks + sum(sizes[:rank])
        wanted = [whole[rank], whole[ranks + rank], *whole[first : first + sizes[rank]]]
        assert_close(mine, wanted, torch.float64)
