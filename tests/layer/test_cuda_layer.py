"""The layer on CUDA equals the layer on the CPU: virtual ranks, and processes that share one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import isoload
from isoload.experts.weights import ExpertWeights
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from support.borrowed_layer import LLEP
from support.borrowed_layer import make_setup as make_borrowing_setup
from support.small_layer import STACKS, close, make_setup

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
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


@pytest.mark.parametrize("capacity", [None, 13])
@pytest.mark.parametrize("policy", ["none", "exact"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_virtual_ranks(dtype: torch.dtype, policy: str, capacity: int | None) -> None:
    setup = make_setup(4, dtype=dtype, bias=True, masked=True)
    results, layers = {}, {}
    for device in ("cpu", "cuda"):
        transport = LocalTransport(setup.topology, max_tokens_per_rank=capacity)
        layers[device] = make_layer(setup, device, transport, policy=policy)
        results[device] = train(layers[device], [row.to(device) for row in setup.rows])
        transport.group.check()
    assert_close(results["cuda"], results["cpu"], dtype)
    plans = [layers[device].last_plan for device in ("cpu", "cuda")]
    assert torch.equal(plans[0].quota, plans[1].quota.cpu()), "the same plan on both devices"


@pytest.mark.parametrize("backend", ["pull", "copy", "all_to_all"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_borrowed_weights(dtype: torch.dtype, backend: str) -> None:
    """Two layers on one transport, so that streams, both buffers and the return of gradients take part."""
    setup, results = make_borrowing_setup(4, dtype=dtype, bias=True), {}
    for device in ("cpu", DEVICE):
        there = setup.to(device)
        transport = LocalTransport(setup.placement.topology)
        layers = [there.layer(transport, **LLEP, borrow=backend) for _ in range(3)]
        rows = [row.clone().requires_grad_() for row in there.rows]
        y = rows
        for layer in layers:
            y = [a + b for a, b in zip(y, layer(y), strict=True)]
        sum((row.double() ** 2).sum() for row in y).backward()
        leaves = [*rows, *(p for layer in layers for p in layer.parameters())]
        results[device] = [t.detach().cpu() for t in (*y, *(leaf.grad for leaf in leaves))]
        assert int(layers[0].last_plan.telemetry[0]) > 0
    assert_close(results[DEVICE], results["cpu"], dtype)


def test_check_tells_what_ops_noted() -> None:
    setup = make_setup(4)
    transport = LocalTransport(setup.topology, max_tokens_per_rank=13)
    train(make_layer(setup, "cuda", transport), [row.cuda() for row in setup.rows])
    isoload.count(torch.tensor([[0, 99]], device="cuda"), 4)
    with pytest.raises(ValueError, match="count: topk_ids"):
        transport.group.check()
    transport.group.check()


def in_processes(body: Callable[[int, int], Any], ranks: int, folder: Path) -> list[Any]:
    """What ``body(rank, ranks)`` returned in fresh processes of one gloo group: forked ones cannot use CUDA."""
    torch.multiprocessing.spawn(_process, (body, ranks, str(folder)), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _process(rank: int, body: Callable[[int, int], Any], ranks: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=40))
    torch.save(body(rank, ranks), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def train_one(rank: int, ranks: int) -> list[Tensor | None]:
    """One process's step on the GPU that all share."""
    setup = make_setup(ranks)
    layer = make_layer(setup, "cuda", CollectiveTransport(setup.topology), policy="exact")
    return train(layer, [setup.rows[rank].to("cuda")])


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


def test_borrowing_processes_on_one_gpu(tmp_path: Path) -> None:
    check_borrowing_processes("all_to_all", tmp_path)


def test_processes_on_one_gpu(tmp_path: Path) -> None:
    ranks = 4
    setup = make_setup(ranks)
    layer = make_layer(setup, "cpu", LocalTransport(setup.topology), policy="exact")
    whole = train(layer, setup.rows)
    outputs, grads = whole[:ranks], whole[ranks : 2 * ranks]
    sizes = [len(list(weights.parameters())) for weights in layer.weights]
    for rank, mine in enumerate(in_processes(train_one, ranks, tmp_path)):
        first = 2 * ranks + sum(sizes[:rank])
        wanted = [outputs[rank], grads[rank], *whole[first : first + sizes[rank]]]
        assert_close(mine, wanted, torch.float64)
