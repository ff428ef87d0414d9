"""DeepEP itself between processes: the conformance suite of every transport, a layer, a graph.

EPBuffer and ElasticBuffer use NCCL, which needs a GPU for each rank: they run first, where there are so many. Buffer
reaches peers by CUDA IPC, within one device too: its processes share a GPU, which runs them by turns, so no time tells
anything. Low latency needs NVSHMEM and does not run here.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import CollectiveGroup, LocalTransport, Received, Transport
from isoload.transport.deep_ep import DeepEPTransport
from isoload.transport.deep_ep import transport as packages
from support.conformance import CASES, TOLERANCES
from support.cuda_layer import in_processes, make_skewed
from support.deep_ep_transports import AnyShape

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
INSTALLED = {name for package in packages.installed() for name in package.buffers}
DEVICE = "cuda"
KINDS = pytest.mark.parametrize("kind", packages.BUFFERS)
RANKS, EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 2, 16, 256, 128, 4, 64
# DeepEP moves the bytes and numbers the rows; EPBuffer and ElasticBuffer add in another order than LocalTransport
ELSEWHERE = {"bytes", "traffic"}, {"bytes", "traffic", "equals_local"}
KEPT: list[Any] = []  # to the end of the process: the end of a buffer is a meeting of all ranks


def over(kind: str, body: Callable[..., Any], ranks: int, folder: Path) -> list[Any]:
    """What ``body(rank, ranks, kind)`` returned in processes, if this machine can run the buffer."""
    if kind not in INSTALLED:
        pytest.skip(f"no DeepEP with {kind}")
    own_gpus = kind != "Buffer"
    if own_gpus and torch.cuda.device_count() < ranks:
        pytest.skip(f"{kind} needs a GPU for each of {ranks} ranks, got {torch.cuda.device_count()}")
    return in_processes(partial(body, kind=kind), ranks, folder, own_gpus)


@cache
def buffer_by_size(kind: str) -> Any:
    """DeepEP's buffer, of which one of each size serves all layers, as in a model."""
    made = packages.load_buffer(kind)
    once: Any = cache(lambda *size, **how: made(*size, **how))
    once.__name__ = made.__name__
    if kind == "Buffer":
        once.get_dispatch_config, once.get_combine_config = made.get_dispatch_config, made.get_combine_config
    return once


class OnGPU(AnyShape):
    """What the suite hands over lies on the CPU, and so does what it gets."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.received: dict[int, list[Received]] = {}

    def dispatch(
        self, x: Any, slots: Any, weights: Any, slots_per_rank: int, call: Any = None
    ) -> list[Received]:
        there = ([value.to(DEVICE) for value in values] for values in (x, slots, weights))
        received = super().dispatch(*there, slots_per_rank, call)
        self.received[id(received[0].handle)] = received
        return [
            replace(got, rows=got.rows.cpu(), slots=got.slots.cpu(), weights=got.weights.cpu())
            for got in received
        ]

    def combine(self, y: Any, received: list[Received], own: Any = None) -> list[Tensor]:
        there = self.received[id(received[0].handle)]
        mine = None if own is None else [value.to(DEVICE) for value in own]
        return [out.cpu() for out in super().combine([value.to(DEVICE) for value in y], there, mine)]


def failed_cases(rank: int, ranks: int, kind: str, waits: bool) -> dict[str, str]:
    failed = {}

    def make() -> Transport:
        group = CollectiveGroup(isoload.Topology(ranks))
        return Transport(group, OnGPU(group, buffer_by_size(kind), waits))

    for name in sorted(CASES.keys() - ELSEWHERE[kind != "Buffer"]):
        try:
            CASES[name](make)
        except Exception:  # CUDA's, too: the test fails with all that its cases said
            failed[name] = traceback.format_exc()
    torch.cuda.synchronize()
    return failed


@pytest.mark.parametrize(("ranks", "waits"), [(2, True), (2, False), (4, True)])
@KINDS
def test_conformance(kind: str, ranks: int, waits: bool, tmp_path: Path) -> None:
    for rank, failed in enumerate(over(kind, partial(failed_cases, waits=waits), ranks, tmp_path)):
        assert not failed, f"rank {rank}: {''.join(failed.values())}"


def layer_on(transport: Transport, fails: Callable[[], bool] = bool, **how: Any) -> isoload.MoE:
    choose, dense = make_skewed(EXPERTS, HIDDEN, INNER, TOP_K)
    topology = transport.group.topology
    placement = isoload.place(torch.ones(1, EXPERTS), topology, slots_per_rank=EXPERTS // RANKS + 2)

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        if fails():
            raise RuntimeError("no choice")
        return choose(rows)

    return isoload.MoE(gate, dense, transport, placement, **how)


def rows_of(rank: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(7 * seed + rank)
    return torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16().to(DEVICE)


def deep_ep(ranks: int, kind: str, waits: bool) -> Transport:
    shape = {
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "slots_per_rank": EXPERTS // RANKS + 2,
        "max_tokens_per_rank": TOKENS,
    }
    KEPT.append(DeepEPTransport(isoload.Topology(ranks), kind=kind, waits=waits, **shape))
    return KEPT[-1]


def outputs_and_gradients(rank: int, ranks: int, kind: str) -> list[list[Tensor]]:
    found = []
    layers = [layer_on(deep_ep(ranks, kind, waits)) for waits in (True, False)]
    for layer in layers:
        rows = rows_of(rank).requires_grad_()
        out = layer(rows)
        out.float().square().sum().backward()
        plan = layer.balancer.last_plan
        assert plan is not None and torch.equal(plan.peak, plan.bound)
        found.append([value.detach().cpu() for value in (out, rows.grad)])
    torch.cuda.synchronize()
    return found


@KINDS
def test_a_layer_is_that_of_one_process(kind: str, tmp_path: Path) -> None:
    rows = [rows_of(rank).requires_grad_() for rank in range(RANKS)]
    whole = layer_on(LocalTransport(isoload.Topology(RANKS)))(rows)
    torch.stack([out.float().square().sum() for out in whole]).sum().backward()
    for rank, found in enumerate(over(kind, outputs_and_gradients, RANKS, tmp_path)):
        for mine in found:
            for value, wanted in zip(mine, (whole[rank].detach(), rows[rank].grad), strict=True):
                limit = TOLERANCES[torch.bfloat16] * float(wanted.abs().max())
                assert (value.float() - wanted.cpu().float()).abs().max() <= limit


def replayed(rank: int, ranks: int, kind: str) -> list[Tensor]:
    """By its own counts a rank needs no exchange but DeepEP's: all of a forward is one graph."""
    layer = layer_on(deep_ep(ranks, kind, False), loads="own")
    found: list[Tensor] = []
    with torch.no_grad():
        rows = rows_of(rank)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                layer(rows)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(rows)
        for seed in range(1, 4):
            rows.copy_(rows_of(rank, seed))
            graph.replay()
            torch.cuda.synchronize()
            found += [out.cpu(), layer(rows).cpu()]
            torch.cuda.synchronize()
    return found


@KINDS
def test_a_forward_is_one_graph(kind: str, tmp_path: Path) -> None:
    for found in over(kind, replayed, RANKS, tmp_path):
        assert found[0].any() and not torch.equal(found[0], found[2])
        for a, b in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(a, b)


def told(rank: int, ranks: int, kind: str) -> list[str]:
    """What a rank raises in three batches, in the second of which rank 1 fails."""
    said, failing = [], iter([False, rank == 1, False])
    layer = layer_on(deep_ep(ranks, kind, True), lambda: next(failing))
    for _ in range(3):
        try:
            layer(rows_of(rank))
            said.append("")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    torch.cuda.synchronize()
    return said


@KINDS
def test_a_rank_that_fails_is_told_before_deep_ep_waits_for_it(kind: str, tmp_path: Path) -> None:
    others, own = over(kind, told, RANKS, tmp_path)
    assert own == ["", "no choice", ""]
    assert others[0] == others[2] == "" and "rank 1" in others[1]
