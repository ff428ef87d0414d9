"""A LibraStack on a GPU, with virtual ranks: the dense model's results, captured too, and which stream plans.

Every wait of the host raises under sync debug mode "error"; streams are those that the profiler sees.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import isoload
from isoload.layer.stack import LibraStack
from isoload.transport import LocalTransport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU, compute_path
from support.stacks import TOKENS, Model, close, run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE, LAYERS = "cuda", 3
RANKS, EXPERTS, HIDDEN, INNER, TOP_K, CAPACITY = 4, 32, 256, 128, 4, 64  # of the stack in bfloat16
ORDERS = [("held", "hedge"), ("held", "libra"), ("planned", "hedge"), ("planned", "libra")]


def on_gpu(model: Model) -> Model:
    there = copy.copy(model)
    there.gates = [copy.deepcopy(gate).to(DEVICE) for gate in model.gates]
    there.dense = [ExpertWeights(*(s.to(DEVICE) for s in d.stacks().values())) for d in model.dense]
    return there


@pytest.mark.parametrize("borrow", ["pull", "copy", "all_to_all"])
@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize(("local", "policy"), ORDERS)
@torch.no_grad()
def test_equals_the_dense_model(local: str, policy: str, num_shared: int, borrow: str) -> None:
    """In float64, against the CPU, and with the CPU's plans."""
    model = Model(RANKS, LAYERS, num_shared=num_shared)
    capacity = max(TOKENS) if local == "held" else None
    by_device = {}
    for device in ("cpu", DEVICE):
        there = model if device == "cpu" else on_gpu(model)
        how = {"policy": policy} if device == "cpu" else {"policy": policy, "borrow": borrow}
        layers = there.layers(LocalTransport(model.topology, capacity), **how)
        LibraStack(layers, "lookahead", local=local)
        by_device[device] = layers
    for batch in range(4):
        rows = model.rows(batch)
        wanted = model.wanted(rows)
        assert all(close(a, b, 1e-12) for a, b in zip(run(by_device["cpu"], rows), wanted, strict=True))
        got = run(by_device[DEVICE], [row.to(DEVICE) for row in rows])
        assert all(close(a.cpu(), b, 1e-11) for a, b in zip(got, wanted, strict=True)), batch
        for ours, theirs in zip(*by_device.values(), strict=True):
            assert ours.last_plan is not None and theirs.last_plan is not None
            assert torch.equal(theirs.last_plan.slot_to_expert.cpu(), ours.last_plan.slot_to_expert)
            assert torch.equal(theirs.last_plan.quota.cpu(), ours.last_plan.quota)
    by_device[DEVICE][0].group.check()


class Fast:
    """A stack in bfloat16 whose gates and experts do not make the host wait; each layer is given the same rows."""

    def __init__(
        self, local: str, policy: str, tokens: int = CAPACITY, hidden: int = HIDDEN, inner: int = INNER
    ) -> None:
        draw = torch.Generator(DEVICE).manual_seed(3)
        self.tokens, self.hidden = tokens, hidden
        self.transport = LocalTransport(isoload.Topology(RANKS), tokens)
        placement = isoload.place(
            torch.ones(LAYERS, EXPERTS),
            self.transport.group.topology,
            slots_per_rank=EXPERTS // RANKS + 2,
            spare_slots=2,
            placer="trivial",
        )
        self.dense = [
            ExpertWeights.random(
                EXPERTS, hidden, inner, generator=draw, dtype=torch.bfloat16, device=torch.device(DEVICE)
            )
            for _ in range(LAYERS)
        ]
        routers = torch.randn(LAYERS, EXPERTS, hidden, generator=draw, device=DEVICE)
        skew = torch.linspace(4, 0, EXPERTS, device=DEVICE)

        def gate(rows: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            weights, ids = (rows.float() @ routers[layer].T / hidden**0.5 + skew).softmax(-1).topk(TOP_K)
            return ids, weights

        self.gates = [lambda rows, i=i: gate(rows, i) for i in range(LAYERS)]
        self.layers = [
            isoload.MoE(own, dense, self.transport, placement, layer=i, policy=policy, borrow="pull")
            for i, (own, dense) in enumerate(zip(self.gates, self.dense, strict=True))
        ]
        weights = ExpertWeights(*self.layers[0].weights[0].stored_rows())
        if compute_path(weights) == "loop" or torch.cuda.get_device_capability()[0] not in (9, 10):
            pytest.skip("the experts make the host wait: torch loops over them")
        self.stack = LibraStack(self.layers, "lookahead", local=local)

    def rows(self, seed: int) -> list[Tensor]:
        """A rank without tokens, too."""
        draw = torch.Generator(DEVICE).manual_seed(seed)
        sizes = [self.tokens, 0, self.tokens // 3, self.tokens]
        return [
            torch.randn(n, self.hidden, generator=draw, device=DEVICE, dtype=torch.bfloat16) for n in sizes
        ]

    def batch(self, rows: list[Tensor]) -> list[Tensor]:
        return [y for layer in self.layers for y in layer(rows)]

    def wanted(self, rows: list[Tensor]) -> list[Tensor]:
        made = []
        for gate, dense in zip(self.gates, self.dense, strict=True):
            made += [run_experts(row, *gate(row), [dense], SwiGLU()) for row in rows]
        return made

    def is_right(self, got: list[Tensor], rows: list[Tensor]) -> bool:
        pairs = zip(got, self.wanted(rows), strict=True)
        return all(close(a, b.double(), 2e-2) for a, b in pairs)


class Launched(NamedTuple):
    """A kernel; times in nanoseconds."""

    name: str
    stream: int
    begin: int
    end: int


@contextmanager
def no_wait() -> Iterator[None]:
    """Whatever makes the host wait raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("local", "policy"), ORDERS)
@torch.no_grad()
def test_a_stack_never_waits_and_captures(local: str, policy: str) -> None:
    """A graph of all layers, replayed with five batches; batches outside of it in between."""
    fast = Fast(local, policy)
    static = fast.rows(0)
    for _ in range(2):  # one that compares facts and loads kernels, one that finds all buffers made
        assert fast.is_right(fast.batch(static), static)
    with no_wait():
        fast.batch(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fast.batch(static)
    filled = [layer.last_plan.slot_to_expert for layer in fast.layers]  # type: ignore[union-attr]
    for seed in range(1, 6):
        rows = fast.rows(seed)
        for given, new in zip(static, rows, strict=True):
            given.copy_(new)
        graph.replay()
        assert fast.is_right(outputs, rows), seed
        spare = [slots.view(RANKS, -1)[:, -2:] >= 0 for slots in filled]
        assert not spare[0].any() and all(of.any() for of in spare[1:]), (
            "a replay fetches for all but the first"
        )
        assert fast.is_right(fast.batch(rows), rows), seed
    fast.transport.group.check()


@pytest.mark.parametrize(("local", "policy"), ORDERS)
@torch.no_grad()
def test_which_stream_plans(local: str, policy: str) -> None:
    """Where copies that stay are known before the plan it runs on another stream than they, and at the same time."""
    fast = Fast(local, policy, tokens=4096, hidden=2048, inner=1024)
    rows = fast.rows(0)
    for _ in range(2):
        fast.batch(rows)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fast.batch(rows)
        torch.cuda.synchronize()
    kernels = [
        Launched(event.name(), event.device_resource_id(), event.start_ns(), event.end_ns())
        for event in profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    if not kernels:
        pytest.skip("the profiler has no access to kernels")
    names = "\n".join(sorted({kernel.name[:120] for kernel in kernels}))
    gemms = [k for k in kernels if "gemm" in k.name.lower() or "cutlass" in k.name.lower()]
    splits, fills = ([k for k in kernels if name in k.name] for name in ("plan_exact", "plan_fill"))
    assert gemms and splits and fills, names
    apart = fills if (local, policy) == ("planned", "hedge") else fills + splits
    streams = {kernel.stream for kernel in apart}
    assert len(streams) == 1 and streams.isdisjoint(kernel.stream for kernel in gemms), names
    beside = sum(any(k.begin < g.end and g.begin < k.end for g in gemms) for k in apart)
    print(f"\n{local}, {policy}: {beside} of {len(apart)} kernels that plan ran beside a GEMM")
