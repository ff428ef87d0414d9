"""MoE.forward on a GPU in both tiers: the host waits once (exact splits) or never (fixed capacity), which captures.

Every wait raises under sync debug mode "error"; how many kernels a forward takes is printed (-s).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, byref, c_int, c_size_t, c_void_p
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.weights.experts import ExpertWeights, compute_path
from support.cuda_layer import make_skewed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 32, 256, 128, 4, 64
KINDS = {0: "kernel", 1: "memcpy", 2: "memset"}  # CUgraphNodeType


@pytest.fixture
def nccl() -> Iterator[None]:
    """A group of this process alone: its collectives are NCCL's, and enqueue like those of many."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(params=["none", "exact", "llep", "nccl"])
def make_layer(request: pytest.FixtureRequest) -> Callable[[int | None], isoload.MoE]:
    """Layers for a capacity, or None for exact splits: four virtual ranks by policy, or one rank behind NCCL."""
    if request.param != "nccl":
        return lambda capacity: layer_on(LocalTransport(isoload.Topology(4), capacity), request.param)
    request.getfixturevalue("nccl")
    return lambda capacity: layer_on(
        CollectiveTransport(isoload.Topology(1), max_tokens_per_rank=capacity), "none"
    )


def layer_on(transport: Transport, policy: str) -> isoload.MoE:
    """A bfloat16 layer whose gate and experts do not make the host wait."""
    gate, dense = make_skewed(EXPERTS, HIDDEN, INNER, TOP_K)
    ranks, spare = transport.group.topology.num_ranks, 2 * (policy == "llep")
    own = EXPERTS if ranks == 1 else EXPERTS // ranks + 2  # two of them replicas, or spare
    how = {"slots_per_rank": own, "spare_slots": spare, "placer": "trivial" if spare else "eplb"}
    placement = isoload.place(torch.ones(1, EXPERTS), transport.group.topology, **how)
    options = {"min_chunk": 1, "threshold": 1.0} if spare else {}
    return isoload.MoE(gate, dense, transport, placement, policy=policy, **options)


def draw_rows(transport: Transport, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16().to(DEVICE) for _ in transport.group.ranks]


@contextmanager
def no_wait_but(reads: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever makes the host wait raises, but for `.tolist()` of a tensor there, which is noted."""
    tolist = Tensor.tolist

    def noted(tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return tolist(tensor)
        reads.append(tensor)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tolist(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", noted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def need_one_kernel(layer: isoload.MoE) -> None:
    """Where torch itself loops over the experts on the host, a forward waits for that, too: its grouped_mm does so but
    for bfloat16 on SM 9.x and 10.x."""
    weights = ExpertWeights(*layer.weights[0].stored_rows())
    fast = weights.down.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)
    if compute_path(weights) == "loop" or not fast:
        pytest.skip("the experts make the host wait: torch loops over them")


def launched(call: Callable[[], Any]) -> int:
    """Kernels that a call launches, as the profiler sees them; 0 where it has no access."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not e.name.startswith(("Memcpy", "Memset")) for e in on_device)


def count_nodes(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """The nodes of a captured graph by kind."""
    driver, handle, size = CDLL("libcuda.so.1"), c_void_p(graph.raw_cuda_graph()), c_size_t()
    assert driver.cuGraphGetNodes(handle, None, byref(size)) == 0
    nodes = (c_void_p * size.value)()
    assert driver.cuGraphGetNodes(handle, nodes, byref(size)) == 0
    kinds: Counter[str] = Counter()
    for node in nodes:
        kind = c_int()
        assert driver.cuGraphNodeGetType(c_void_p(node), byref(kind)) == 0
        kinds[KINDS.get(kind.value, "other")] += 1
    return kinds


@torch.no_grad()
def test_exact_splits_wait_once(
    make_layer: Callable[[int | None], isoload.MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(None)
    need_one_kernel(layer)
    transport, rows = layer.transport, draw_rows(layer.transport, 1)
    wanted = layer(rows)  # the first batch compares facts between the ranks and loads kernels
    before, reads = transport.group.traffic.host_syncs, list[Tensor]()
    with no_wait_but(reads, monkeypatch):
        got = layer(rows)
    assert transport.group.traffic.host_syncs - before == 1 and len(reads) <= 1
    transport.group.check()
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    print(
        f"\n{type(transport).__name__}, {layer.policy.name}, exact splits: {launched(lambda: layer(rows))} kernels"
    )


@torch.no_grad()
def test_a_fixed_capacity_never_waits_and_captures(
    make_layer: Callable[[int | None], isoload.MoE], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured once, replayed with five batches: each time what the layer gives outside of the graph."""
    layer = make_layer(TOKENS)
    need_one_kernel(layer)
    transport, held = layer.transport, draw_rows(layer.transport, 1)
    for _ in range(2):  # one that compares facts and loads kernels, one that finds all buffers made
        layer(held)
    reads: list[Tensor] = []
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with no_wait_but(reads, monkeypatch):
        layer(held)
        with torch.cuda.graph(graph):
            outputs = layer(held)
    assert reads == []
    graph.instantiate()
    for seed in range(5):
        rows = draw_rows(transport, seed)
        wanted = layer(rows)
        for static, new in zip(held, rows, strict=True):
            static.copy_(new)
        graph.replay()
        for a, b in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(a, b)
    transport.group.check()
    print(
        f"\n{type(transport).__name__}, {layer.policy.name}, fixed capacity: {dict(count_nodes(graph))} nodes"
    )


def test_a_captured_graph_draws_anew_at_every_replay() -> None:
    """The kernels read the batch's number, which the graph advances."""
    placement = isoload.place(torch.arange(EXPERTS).expand(1, -1), isoload.Topology(4), slots_per_rank=12)
    captured, eager = (isoload.Balancer(placement, 0, "dynamic", tokens="same") for _ in range(2))
    ids = torch.arange(TOKENS * TOP_K, device=DEVICE).view(TOKENS, TOP_K) % EXPERTS
    assert torch.equal(captured(ids), eager(ids))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = captured(ids)
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(slots.clone())
        assert torch.equal(drawn[-1], eager(ids))
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
