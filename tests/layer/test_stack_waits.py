"""How often a stack makes the host wait for a GPU: as often as its layers do without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import isoload
from isoload.experts.weights import ExpertWeights
from isoload.layer.stack import LibraStack
from isoload.transport import LocalTransport, Transport
from support.fake_ranks import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    TOKENS,
    VIRTUAL,
    Everything,
    answer,
    gate,
    kept_memos,
    one_rank,
    short,
    wanted,
)
from support.host_waits import HostWaits
from support.sweeps import rest

LAYERS = 2


def waits_of(
    transport: Transport, predict: str, local: str, policy: str, borrow: str
) -> tuple[list[str], int]:
    """What the third batch waits for, and what it counts itself. The first two make tables."""
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
        rows: Any = [torch.zeros(TOKENS[r], HIDDEN, dtype=dtype, device="cuda") for r in group.ranks]
        for layer in layers * 2:
            layer(rows)
        waited, before = len(host.waits), group.traffic.host_syncs
        for layer in layers:
            layer(rows)
            assert stack._fetched is not None
        return host.waits[waited:], group.traffic.host_syncs - before


@pytest.mark.parametrize(
    ("borrow", "rank", "predict", "policy", "local"),
    [
        ("pull", 0, "lookahead", "hedge", "held"),
        ("pull", 0, "last", "libra", "planned"),
        ("copy", 0, "last", "hedge", "planned"),
        ("all_to_all", 0, "lookahead", "hedge", "held"),
        ("all_to_all", 1, "last", "libra", "planned"),
        ("p2p", 1, "lookahead", "hedge", "planned"),
        *rest(
            ("pull", 0, "lookahead", "hedge", "planned"),
            ("pull", 0, "last", "libra", "held"),
            ("copy", 0, "last", "hedge", "held"),
            ("all_to_all", 0, "lookahead", "hedge", "planned"),
            ("all_to_all", 1, "last", "libra", "held"),
            ("p2p", 1, "lookahead", "hedge", "held"),
        ),
    ],
)
def test_one_wait_per_layer(
    borrow: str, rank: int, predict: str, policy: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a capacity none, but for back ends that read the plan on the host."""
    stub = SimpleNamespace(
        get_backend=lambda _group: "nccl",
        get_process_group_ranks=lambda _group: list(range(4)),
        P2POp=lambda *operation: operation,
        isend=None,
        irecv=None,
        batch_isend_irecv=lambda _operations: [],
    )
    monkeypatch.setattr("isoload.weights.backends.dist", stub)
    for capacity in (CAPACITY,) if local == "held" else (None, CAPACITY):
        waits, syncs = wanted(capacity)
        if capacity is not None and borrow != "pull":
            waits, syncs = ["event in weights/backend.py"], 1
        alone = borrow in ("all_to_all", "p2p")
        transport = one_rank(rank, capacity) if alone else LocalTransport(VIRTUAL, capacity)
        found = short(waits_of(transport, predict, local, policy, borrow))
        if capacity is not None and borrow == "p2p":  # reads a plan late: fakes take it for read by then
            waits = found[0][:1]
            found = waits * LAYERS, found[1]
        assert found == (waits * LAYERS, syncs * LAYERS), capacity
