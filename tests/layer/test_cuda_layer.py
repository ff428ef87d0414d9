"""The layer on CUDA equals the layer on the CPU: virtual ranks, and processes that share one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import CollectiveTransport, LocalTransport
from support.borrowed_layer import LLEP
from support.borrowed_layer import make_setup as make_borrowing_setup
from support.cuda_layer import (
    DEVICE,
    TOLERANCE,
    assert_close,
    check_borrowing_processes,
    in_processes,
    make_layer,
    train,
)
from support.small_layer import make_setup

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


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


def train_one(rank: int, ranks: int) -> list[Tensor | None]:
    """One process's step on the GPU that all share."""
    setup = make_setup(ranks)
    layer = make_layer(setup, "cuda", CollectiveTransport(setup.topology), policy="exact")
    return train(layer, [setup.rows[rank].to("cuda")])


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
