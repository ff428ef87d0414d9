"""A layer over DeepEP's doubles is the dense layer: borrowing by DeepEP, low latency, what a layer refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoload
from isoload import Topology
from isoload.layer import moe
from isoload.transport import CollectiveGroup, CollectiveTransport
from isoload.transport.deep_ep import DeepEPTransport
from isoload.weights.experts import ExpertWeights
from support.borrowed_layer import LLEP, STACKS, TOLERANCE, TOP_K, Setup, close, make_setup
from support.deep_ep_transports import BUFFERS
from support.processes import run_ranks
from support.sweeps import slow

BOUND = TOLERANCE[torch.bfloat16]


def transport_of(
    setup: Setup, kind: str = "EPBuffer", borrow_bytes: int = 2**21, **how: Any
) -> DeepEPTransport:
    """Over a double, made as DeepEPTransport makes the installed one."""
    hidden = setup.rows[0].shape[1]
    more = {"lb_allocation_plan_or_num_bytes": borrow_bytes} if kind == "EPBuffer" else {}
    if kind == "Buffer":
        more = {"low_latency_mode": True} if how.pop("low_latency", False) else {}
    else:
        more |= {"num_max_tokens_per_rank": 16, "hidden": hidden, "num_topk": TOP_K}
    buffer = BUFFERS[kind](CollectiveGroup(setup.placement.topology).process_group, **more)
    return DeepEPTransport(
        setup.placement.topology,
        hidden=hidden,
        top_k=TOP_K,
        slots_per_rank=setup.placement.slots_per_rank,
        max_tokens_per_rank=16,
        buffer=buffer,
        **how,
    )


def train(setup: Setup, rank: int, transport: Any, **how: Any) -> dict[str, list[Tensor]]:
    """Output and gradients of one rank, for the loss sum(y ** 2)."""
    layer = setup.layer(transport, **how)
    rows = setup.rows[rank].clone().requires_grad_()
    y = layer(rows)
    y.double().square().sum().backward()
    held = layer.weights[0]
    grads = [g for name in STACKS if (g := getattr(held, name)) is not None]
    return {"y": [y.detach()], "rows": [rows.grad], "stacks": [g.grad for g in grads]}


def assert_dense_rank(setup: Setup, rank: int, found: dict[str, list[Tensor]]) -> None:
    ys, row_grads, stack_grads = setup.dense_run()
    homes = setup.placement.home_experts(0, rank)
    wanted = [g[homes] for g in stack_grads if g is not None]
    assert close(found["y"][0], ys[rank], BOUND)
    assert close(found["rows"][0], row_grads[rank], 4 * BOUND)
    assert all(close(a, b, 4 * BOUND) for a, b in zip(found["stacks"], wanted, strict=True))


def small(ranks: int, **how: Any) -> Setup:
    return make_setup(ranks, hidden=256, dtype=torch.bfloat16, **how)


def both(rank: int, ranks: int, waits: bool) -> int:
    """Borrowing by DeepEP beside borrowing by all_to_all, both against the dense layer; how many were borrowed."""
    setup = small(ranks, bias=True)
    transport = transport_of(setup, waits=waits)
    ours, theirs = (train(setup, rank, transport, **LLEP, borrow=name) for name in ("all_to_all", "deep_ep"))
    assert torch.equal(ours["y"][0], theirs["y"][0])
    assert torch.equal(ours["rows"][0], theirs["rows"][0])
    for found in (ours, theirs):
        assert_dense_rank(setup, rank, found)
    layer = setup.layer(transport, **LLEP, borrow="deep_ep")
    layer(setup.rows[rank])
    return int((layer.last_plan.slot_to_expert.view(ranks, -1)[:, -2:] >= 0).sum())


@pytest.mark.parametrize(("ranks", "waits"), [(2, True), *slow((4, False))])
def test_borrowing_by_deep_ep_is_the_dense_layer(ranks: int, waits: bool) -> None:
    borrowed = run_ranks(both, ranks, ranks, waits, timeout=150)
    assert min(borrowed) > 0


def over_a_shard(rank: int, ranks: int) -> int:
    """Experts that the model holds, unevenly: 3 ranks for 16."""
    setup = small(ranks)
    homes = setup.placement.home_experts(0, rank)
    parts = [getattr(setup.dense, name) for name in STACKS]
    own = ExpertWeights(*(None if p is None else nn.Parameter(p[homes].clone()) for p in parts))
    answers = setup.ids[rank]
    layer = isoload.MoE(
        lambda rows: (answers, setup.weights(rows)),
        isoload.weights.shard.Shard(homes, own),
        transport_of(setup),
        setup.placement,
        **LLEP,
        borrow="deep_ep",
    )
    rows = setup.rows[rank].clone().requires_grad_()
    y = layer(rows)
    y.double().square().sum().backward()
    grads = [g.grad for name in STACKS if (g := getattr(own, name)) is not None]
    assert_dense_rank(setup, rank, {"y": [y], "rows": [rows.grad], "stacks": grads})
    return len(homes)


def test_experts_of_a_shard() -> None:
    assert len(set(run_ranks(over_a_shard, 3, 3))) == 2


def expert_major(rank: int, ranks: int, borrow: str, replicas: bool) -> tuple[int, int]:
    """Against the dense layer; how often experts took rows as they came, and how often they sorted them."""
    setup = small(ranks, bias=True)
    if replicas:  # before the home slots: their weight rows lie behind those of the homes
        slots = torch.tensor([[8, *range(8), 0, *range(8, 16)]], dtype=torch.int32)
        homes = torch.tensor([[*range(1, 9), *range(10, 18)]], dtype=torch.int32)
        setup.placement = isoload.Placement(slots, setup.placement.topology, 16, home_slot=homes)
    calls = {"run_sorted": 0, "run_experts": 0}
    for name in calls:
        called = getattr(moe, name)

        def counted(*args: Any, name: str = name, called: Any = called) -> Tensor:
            calls[name] += 1
            return called(*args)

        setattr(moe, name, counted)
    how: dict[str, Any] = {"policy": "exact"} if replicas else {**LLEP, "borrow": borrow}
    assert_dense_rank(setup, rank, train(setup, rank, transport_of(setup, expert_major=True), **how))
    return calls["run_sorted"], calls["run_experts"]


@pytest.mark.parametrize(("ranks", "borrow"), [(2, "deep_ep"), (4, "all_to_all")])
def test_rows_by_expert_are_not_sorted_again(ranks: int, borrow: str) -> None:
    assert run_ranks(expert_major, ranks, ranks, borrow, False, timeout=150) == [(1, 0)] * ranks


def test_weights_in_another_order_than_slots_sort_the_rows() -> None:
    assert run_ranks(expert_major, 2, 2, "", True, timeout=150) == [(0, 1), (0, 1)]


def low_latency(rank: int, how: dict[str, Any]) -> None:
    draw = make_setup(2, hidden=2048, dtype=torch.bfloat16)
    outputs = []
    for BUFFERS["Buffer"].left in (0.0, torch.nan, torch.inf):
        transport = transport_of(draw, "Buffer", low_latency=True, waits=False)
        layer = draw.layer(transport, **how)
        with torch.no_grad():
            outputs.append(y := layer(draw.rows[rank]))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert transport.dispatcher.weights_at_source and not transport.dispatcher.host_waits
    wanted = draw.dense_run()[0]
    assert close(y, wanted[rank], BOUND)
    with pytest.raises(ValueError, match="must not require a gradient for DeepEP's Buffer, low latency"):
        layer(draw.rows[rank].clone().requires_grad_())


@pytest.mark.parametrize(
    "how", [{"policy": "exact"}, {**LLEP, "borrow": "all_to_all"}], ids=["exact", "llep"]
)
def test_low_latency_is_the_dense_layer_and_forward_only(how: dict[str, Any]) -> None:
    """What lies in places without a copy changes nothing: it is neither zeroed nor read."""
    run_ranks(low_latency, 2, how)


def refusals(rank: int) -> None:
    setup = small(2)
    with pytest.raises(ValueError, match="borrow must not be deep_ep without a DeepEPTransport"):
        setup.layer(CollectiveTransport(Topology(2, 2)), **LLEP, borrow="deep_ep")
    with pytest.raises(ValueError, match="without lb_prefetch_weights of DeepEP 2.5, got a ElasticBuffer"):
        setup.layer(transport_of(setup, "ElasticBuffer"), **LLEP, borrow="deep_ep")
    far = transport_of(setup)
    far.dispatcher.wire.buffer.num_nvlink_ranks = 1
    with pytest.raises(ValueError, match="where NVLink joins only 1 of 2 ranks"):
        setup.layer(far, **LLEP, borrow="deep_ep")
    with pytest.raises(ValueError, match="borrow_bytes must be at least 16384 .* got 0"):
        setup.layer(transport_of(setup, borrow_bytes=0), **LLEP, borrow="deep_ep")
    with pytest.raises(
        ValueError, match="experts must not be float64 for borrow='deep_ep', .* torch.float64"
    ):
        exact = make_setup(2, hidden=256)
        exact.layer(transport_of(exact), **LLEP, borrow="deep_ep")


def test_what_a_layer_refuses() -> None:
    run_ranks(refusals, 2)


def stacked(rank: int, ranks: int, kind: str, how: dict[str, Any]) -> bool:
    """Two layers in a stack over a double: whether the second batch fetched, and is the dense layers'."""
    low_latency = how.get("low_latency", False)
    setup = make_setup(ranks, hidden=2048 if low_latency else 256, dtype=torch.bfloat16)
    transport = transport_of(setup, kind, waits=not low_latency, **how)
    borrow = "deep_ep" if kind == "EPBuffer" else "all_to_all"
    layers = [setup.layer(transport, policy="hedge", borrow=borrow) for _ in range(2)]
    isoload.LibraStack(layers, "last")
    wanted = setup.dense_run()[0][rank]
    with torch.no_grad():
        for _ in range(2):
            assert all(close(layer(setup.rows[rank]), wanted, BOUND) for layer in layers)
    spare = layers[1].last_plan.slot_to_expert.view(ranks, -1)[:, -2:]
    return bool((spare >= 0).any())


@pytest.mark.parametrize(
    ("kind", "how"),
    [("EPBuffer", {}), ("ElasticBuffer", {}), ("Buffer", {}), ("Buffer", {"low_latency": True})],
)
def test_a_stack_over_the_doubles(kind: str, how: dict[str, Any]) -> None:
    assert all(run_ranks(stacked, 2, 2, kind, how))
