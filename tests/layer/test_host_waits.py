"""How often MoE.forward makes the host wait for a GPU: once with exact split sizes, never with a fixed capacity."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import isoload
from isoload.transport import LocalTransport, NodeDispatcher, Transport
from isoload.weights.experts import ExpertWeights
from support.fake_ranks import (
    CAPACITY,
    EXPERTS,
    HIDDEN,
    RANKS,
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
from support.sweeps import slow

CAPACITIES = pytest.mark.parametrize("capacity", [None, CAPACITY])
NUM_SHARED = {"waterfill_sampled": (1, 1), **dict.fromkeys(("shared_local", "waterfill", "joint"), (1, 2))}
SHARED = [
    (None, 0),
    (CAPACITY, 1),
    *slow((None, 1), (CAPACITY, 0)),
]
ON_HOST = [name for name, policy in isoload.POLICIES.items() if policy.plans_on_host]
ON_DEVICE = [
    name for name, policy in isoload.POLICIES.items() if not policy().cpu_only and name not in ON_HOST
]
BORROWING = [name for name in ON_DEVICE if isoload.POLICIES[name]().borrows]


def waits_of(
    transport: Transport, num_shared: int = 0, module: bool = False, **how: Any
) -> tuple[list[str], int]:
    """What the second forward of a layer on a GPU waits for, and what it counts itself. The first makes buffers."""
    borrows = isoload.POLICIES[how["policy"]]().borrows
    topology = transport.group.topology
    spare = 2 if borrows else 0
    placement = isoload.place(
        torch.arange(1.0, EXPERTS + 1).unsqueeze(0) ** 2,
        topology,
        slots_per_rank=EXPERTS // topology.num_ranks + (2 if borrows else 1) + num_shared,
        spare_slots=spare,
        num_shared=num_shared,
        placer="trivial" if borrows else "eplb",
    )
    shape = (EXPERTS + num_shared, 2 * HIDDEN, HIDDEN)
    group, dtype = transport.group, torch.bfloat16
    # the agreements of a first batch read values: on real tensors
    dense = ExpertWeights(torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], HIDDEN, HIDDEN, dtype=dtype))
    rows = [torch.zeros(TOKENS[rank], HIDDEN, dtype=dtype) for rank in group.ranks]
    if len(group.ranks) == 1:
        group._agreed = Everything()
    else:
        isoload.MoE(gate, dense, transport, placement, **{**how, "borrow": None})(rows)
    reads = partial(answer, num_counts=getattr(transport.dispatcher, "num_counts", 2))
    with HostWaits(reads) as host, torch.no_grad(), kept_memos():
        dense = ExpertWeights(
            *(torch.zeros(s.shape, dtype=dtype, device="cuda") for s in (dense.gate_up, dense.down))
        )
        shared = nn.Identity() if module else None
        layer = isoload.MoE(gate, dense, transport, placement, shared=shared, **how)
        balancer = layer.balancer
        balancer._own[dense.down.device] = balancer.placed_on(dense.down.device)
        rows = [torch.zeros(row.shape, dtype=dtype, device="cuda") for row in rows]
        layer(rows)
        host.waits.clear()
        before = group.traffic.host_syncs
        layer(rows)
        return host.waits, group.traffic.host_syncs - before


@pytest.mark.parametrize(("capacity", "more"), SHARED)
@pytest.mark.parametrize("policy", ON_DEVICE)
def test_every_policy(policy: str, capacity: int | None, more: int) -> None:
    """Without a shared expert and with one, or with one and two."""
    num_shared = NUM_SHARED.get(policy, (0, 1))[more]
    transport = LocalTransport(VIRTUAL, capacity)
    assert short(waits_of(transport, num_shared, policy=policy)) == wanted(capacity), num_shared


@CAPACITIES
@pytest.mark.parametrize("policy", ON_HOST)
def test_policies_that_plan_on_the_cpu_wait_once_more(policy: str, capacity: int | None) -> None:
    """They declare it: the loads are read once, for the fill and the split, and the plan goes back unwaited for."""
    waits, counted = short(waits_of(LocalTransport(VIRTUAL, capacity), policy=policy))
    assert waits == ["tolist in policies/published_borrowing.py", *wanted(capacity)[0]]
    assert counted == wanted(capacity)[1]


@CAPACITIES
@pytest.mark.parametrize("policy", ["exact", "llep"])
def test_dispatch_by_nodes(policy: str, capacity: int | None) -> None:
    """Both hops' sizes come with one wait."""
    transport = LocalTransport(isoload.Topology(RANKS, 2), capacity, dispatch="node")
    assert isinstance(transport.dispatcher, NodeDispatcher)
    assert short(waits_of(transport, policy=policy)) == wanted(capacity)


@CAPACITIES
def test_shared_modules_and_small_batches(capacity: int | None) -> None:
    for how in ({"module": True}, {"min_tokens": 1000}):
        transport = LocalTransport(VIRTUAL, capacity)
        assert short(waits_of(transport, policy="exact", **how)) == wanted(capacity), how


@pytest.mark.parametrize("num_policies", [1, *slow(len(BORROWING))])
@CAPACITIES
@pytest.mark.parametrize(
    ("borrow", "rank"),
    [("pull", 0), ("copy", 0), ("all_to_all", 1), ("all_to_all", 0)],
)
def test_every_backend_of_borrowing(borrow: str, rank: int, capacity: int | None, num_policies: int) -> None:
    """Those that read the plan on the host do so after dispatch has waited or, with a capacity, wait for it."""
    alone = borrow == "all_to_all"
    expected = wanted(capacity)
    if capacity is not None and borrow != "pull":
        expected = ["event in weights/backends.py"], 1
    for policy in BORROWING[:num_policies]:
        transport = one_rank(rank, capacity) if alone else LocalTransport(VIRTUAL, capacity)
        assert short(waits_of(transport, policy=policy, borrow=borrow)) == expected, policy


@CAPACITIES
def test_a_process_with_one_rank(capacity: int | None) -> None:
    for loads in ("gathered", "node", "own"):
        assert short(waits_of(one_rank(1, capacity), policy="exact", loads=loads)) == wanted(capacity), loads


def test_counting_anew_leaves_the_rows_on_the_device() -> None:
    transport = LocalTransport(VIRTUAL, CAPACITY)
    with HostWaits(answer) as host:
        transport.group.traffic.rows = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
        transport.group.reset_traffic()
        transport.group.traffic.rows.to("cuda:0")
    assert not host.waits


@torch.no_grad()
def test_the_mode_sees_every_kind() -> None:
    """Each line here makes the host wait on a GPU; those after them do not."""
    with HostWaits(answer) as host:
        on_device, here = (
            torch.zeros(4, 3, dtype=torch.int64, device="cuda"),
            torch.ones(2, dtype=torch.int64),
        )
        waiting = {
            "copy cpu to cuda": [
                lambda: on_device.new_tensor([1, 2]),
                lambda: torch.tensor([1, 2], device="cuda"),
                lambda: here.to("cuda:0"),
                lambda: here.to("cuda:0", non_blocking=True),
                lambda: on_device.select(1, 0).narrow(0, 0, 2).copy_(here),
            ],
            "copy cuda to cpu": [lambda: on_device.cpu(), lambda: torch.zeros(4, 3).copy_(on_device)],
            "tolist": [lambda: on_device.tolist()],
            "_local_scalar_dense": [lambda: on_device.sum().item(), lambda: bool(on_device.any())],
            "equal": [lambda: torch.equal(on_device, on_device)],
            "nonzero": [lambda: on_device.nonzero()],
            "mask as index": [lambda: on_device[on_device > 0]],
            "index from the host": [lambda: on_device[[0, 1]], lambda: on_device[here]],
        }
        for kind, calls in waiting.items():
            for i, call in enumerate(calls):
                host.waits.clear()
                try:
                    call()
                except (RuntimeError, NotImplementedError):  # fake tensors have no values to go on with
                    assert host.waits, kind
                assert host.waits == [f"{kind} in the test"], (kind, i)
        host.waits.clear()
        pinned = torch.tensor([1, 2], pin_memory=True)
        pinned.to("cuda:0", non_blocking=True)
        torch.empty(4, 3, dtype=torch.int64, pin_memory=True).copy_(on_device, non_blocking=True)
        on_device[0], on_device[1:3, None]
        on_device[0] = 4
        on_device.new_full((1,), 3)
        torch.full((2,), 7, device="cuda")
        assert host.waits == []
