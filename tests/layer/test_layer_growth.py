"""Nothing grows: a thousand training steps of a layer, and hundreds of placements that come and go."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isoload
from isoload.analysis.simulate import DEFAULT_POLICIES
from isoload.policies import make_policy
from isoload.transport import LocalTransport
from support.live_tensors import live_tensors

RANKS, EXPERTS, TOP_K, HIDDEN, INNER = 4, 6, 2, 4, 4


def make_placement(draw: np.random.Generator) -> isoload.Placement:
    return isoload.place(draw.random((1, EXPERTS)), isoload.Topology(RANKS, 2), slots_per_rank=2)


def resident_bytes() -> int:
    """Of this process, freed memory that the allocator keeps included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Steps:
    """Training steps with another T on every rank and another policy each time."""

    def __init__(self) -> None:
        print("seed 51")
        self.draw = np.random.default_rng(51)
        torch.manual_seed(51)
        self.placement = make_placement(self.draw)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.float64)
        dense = isoload.ExpertWeights.random(EXPERTS, HIDDEN, INNER, dtype=torch.float64)
        self.transport = LocalTransport(self.placement.topology)
        self.layer = isoload.MoE(self.gate, dense, self.transport, self.placement)
        parameters = [*self.layer.parameters(), *self.router.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def gate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(rows).softmax(-1).topk(TOP_K)
        return ids, weights

    def run(self, first: int, last: int) -> None:
        names = ["none", *DEFAULT_POLICIES[1:]]
        for step in range(first, last):
            name = names[step % len(names)]
            self.layer.policy = make_policy(name, {"step": step} if name == "dynamic" else {})
            tokens = self.draw.integers(0, 5, RANKS).tolist()
            rows = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in tokens]
            self.optimizer.zero_grad()
            torch.cat(self.layer(rows)).square().sum().backward()
            self.optimizer.step()
            self.layer.refresh_replicas()

    def caches(self) -> dict[str, int]:
        """Entries of everything that remembers."""
        placed = self.placement._by_device.values()
        own = self.layer.balancer._own.values()
        return {
            "placement": len(placed),
            "policies": sum(len(layers.memos) for layers in [*placed, *own]),
            "agreed facts": len(self.transport.group._agreed),
            "stages of traffic": len(self.transport.group.traffic.bytes),
        }


@pytest.mark.slow
def test_a_thousand_training_steps_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isoload.policies.plan.MOST_DRAWN", 8)  # else the numbers of 16,384 batches are kept
    steps = Steps()
    assert steps.layer.has_replicas
    steps.run(0, 100)
    tensors, caches = live_tensors(), steps.caches()
    blocks, resident = sys.getallocatedblocks(), resident_bytes()
    steps.run(100, 1000)
    assert live_tensors() <= tensors, "fewer if what earlier tests left is freed meanwhile"
    assert (
        steps.caches() == caches == {"placement": 2, "policies": 1, "agreed facts": 1, "stages of traffic": 9}
    )
    assert sys.getallocatedblocks() - blocks < 900, "Python objects: less than one per step"
    assert resident_bytes() - resident < 8_000_000


@pytest.mark.slow
def test_placements_that_are_dropped_are_freed() -> None:
    """A placement and what is derived from it point at each other: the garbage collector has to come by."""
    print("seed 52")
    draw = np.random.default_rng(52)
    loads = torch.from_numpy(draw.integers(0, 50, (RANKS, EXPERTS))).int()
    alive: list[weakref.ref[isoload.Placement]] = []

    def run(rounds: int) -> None:
        for _ in range(rounds):
            placement = make_placement(draw)
            for policy in ("none", *DEFAULT_POLICIES[1:]):
                assert int(isoload.plan(loads, placement, 0, policy).bound) > 0
            alive.append(weakref.ref(placement))

    run(20)
    tensors, blocks, resident = live_tensors(), sys.getallocatedblocks(), resident_bytes()
    run(200)
    assert live_tensors() <= tensors
    assert not any(ref() is not None for ref in alive)
    assert sys.getallocatedblocks() - blocks < 200 * 5, "Python objects: less than one per plan"
    assert resident_bytes() - resident < 8_000_000
