"""The layer with plans that were made ahead is the dense layer, and its ranks exchange nothing but rows and weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import isoload
from isoload import KnownRoutes, MoE
from isoload.balancing.known_routes import KnownPlan, repeated_placement
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.weights.experts import ExpertWeights
from support.borrowed_layer import close
from support.fake_ranks import answer, kept_memos, short, wanted
from support.host_waits import HostWaits
from support.known_step import EXPERTS, LAYERS, RANKS, STACKS, TOKENS, Step, make_step
from support.processes import rank_outcomes, run_ranks

POLICIES: dict[str, dict[str, Any]] = {
    "exact": {},
    "llep": {"min_chunk": 1, "threshold": 1.0},
    "hedge": {},
    "static": {},
    "lp_sampled": {},
}


def no_gate(_rows: Tensor) -> Any:
    raise AssertionError("the routes are given")


def layers_of(step: Step, transport: Transport, **how: Any) -> list[MoE]:
    return [MoE(no_gate, step.dense[i], transport, step.placement, i, **how) for i in range(LAYERS)]


def run(layer: MoE, step: Step, batch: int, plan: KnownPlan | None) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the leaves that get gradients."""
    rows, gates = step.rows(batch), step.gates(batch)
    ys = layer.compute(rows, step.layer_ids(batch, layer.balancer.layer), gates, plan=plan)
    assert isinstance(ys, list)
    return ys, [*rows, *gates]


def assert_dense(step: Step, batch: int, layer: MoE, ys: list[Tensor], leaves: list[Tensor]) -> None:
    """For the loss sum(y ** 2) of this batch alone."""
    index = layer.balancer.layer
    outputs, wanted = step.dense_run(batch, index)
    for mine, theirs in zip(ys, outputs, strict=True):
        assert close(mine, theirs, 1e-12)
    for leaf, gradient in zip(leaves, wanted, strict=False):
        assert leaf.grad is not None and gradient is not None and close(leaf.grad, gradient, 1e-12)
    for rank in layer.weights:
        homes = list(rank.layout.homes)
        for name, gradient in zip(STACKS, wanted[-len(STACKS) :], strict=True):
            assert gradient is not None and close(getattr(rank, name).grad, gradient[homes], 1e-12)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_the_dense_layer(policy: str, repeats: bool) -> None:
    """With repeated ids, masked rows and an empty rank; with the bits of a layer that gathers."""
    borrows = isoload.POLICIES[policy]().borrows
    step = make_step(repeats, spare=2 if borrows else 0)
    how = {"policy": policy, **POLICIES[policy]}
    plans = KnownRoutes(step.ids, step.placement).plans(**how)  # type: ignore[arg-type]
    for index in range(LAYERS):
        layer, gathers = (
            layers_of(step, LocalTransport(step.placement.topology), **how)[index] for _ in range(2)
        )
        for batch in range(len(TOKENS)):
            layer.zero_grad()
            ys, leaves = run(layer, step, batch, plans[batch, index])
            torch.cat(ys).square().sum().backward()
            assert_dense(step, batch, layer, ys, leaves)
            assert layer.last_plan is not None
            if not repeats:
                wanted, _ = run(gathers, step, batch, None)
                assert all(mine.equal(theirs) for mine, theirs in zip(ys, wanted, strict=True))
    assert layer.group.traffic.bytes["gather"] == 0
    counts = sum(
        torch.bincount(ids[ids >= 0], minlength=EXPERTS)
        for row in step.ids
        for ids in (r[:, -1] for r in row)
    )
    assert layer.expert_counts().equal(counts)  # type: ignore[arg-type]  # of all ranks, without a gather


def test_something_was_borrowed() -> None:
    step = make_step()
    plans = KnownRoutes(step.ids, step.placement).plans("llep", **POLICIES["llep"])
    assert all(plans[batch, layer].plan.placed.unfilled is not None for batch in (0, 1) for layer in (0, 1))
    assert plans.whole.telemetry is not None and (plans.whole.telemetry[:, 0] > 0).any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("policy", ["llep", "lp_sampled"])
def test_two_micro_batches_in_flight(policy: str, recompute: bool) -> None:
    """Both forwards before both backwards, the first one first; every batch's experts are brought again.

    The layer's own policy is another one, and borrows nothing. Samples of a recomputed batch are those of its forward.
    """
    step = make_step(repeats=True)
    plans = KnownRoutes(step.ids, step.placement).plans(policy, **POLICIES[policy])
    other = {"lp_sampled": "lp_sampled", "llep": "exact"}[policy]
    layer = layers_of(step, LocalTransport(step.placement.topology), policy=other)[1]
    results: list[tuple[list[Tensor], list[Tensor]]] = []
    for batch in range(2):
        rows, gates = step.rows(batch), step.gates(batch)

        def forward(batch: int = batch, rows: Any = rows, gates: Any = gates) -> Any:
            return layer.compute(rows, step.layer_ids(batch, 1), gates, plan=plans[batch, 1])

        ys = checkpoint(forward, use_reentrant=False) if recompute else forward()
        results.append((ys, [*rows, *gates]))
    for batch, (ys, leaves) in enumerate(results):
        layer.zero_grad()
        torch.cat(ys).square().sum().backward()
        assert_dense(step, batch, layer, ys, leaves)


def test_shared_experts() -> None:
    step = make_step(num_shared=1)
    plans = KnownRoutes(step.ids, step.placement).plans("waterfill")
    layer = layers_of(step, LocalTransport(step.placement.topology), policy="waterfill")[0]
    wanted, _ = run(layer, step, 0, None)
    ys, _ = run(layer, step, 0, plans[0, 0])
    assert all(mine.equal(theirs) for mine, theirs in zip(ys, wanted, strict=True))


def test_a_gate_that_replays_and_compiled_code() -> None:
    step = make_step(repeats=True)
    topology = isoload.Topology(1)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), topology, EXPERTS)
    ids, gates = step.ids[0][2], step.gates(0)[2]
    layer = MoE(lambda _: (ids[:, 0], gates), step.dense[0], LocalTransport(topology), placement)
    plans = KnownRoutes([[ids]], placement).plans()
    rows = step.rows(0)[2]
    with pytest.raises(ValueError, match="must not repeat an expert"):
        layer(rows)
    y = layer(rows, plan=plans[0, 0])
    assert close(y, step.dense_run(0, 0)[0][2], 1e-12)  # type: ignore[arg-type]
    compiled = torch.compile(layer, backend="eager")
    assert compiled(rows, plan=plans[0, 0]).equal(y)


def process(rank: int, policy: str, capacity: int | None) -> tuple[Any, ...]:
    """One step of a process per rank: gathered bytes of the step, and outputs and gradients of the rank."""
    step = make_step()
    transport = CollectiveTransport(step.placement.topology, max_tokens_per_rank=capacity)
    layers = layers_of(step, transport, policy=policy, **POLICIES[policy])
    known = KnownRoutes([[row[rank]] for row in step.ids], step.placement, group=transport.group)
    plans, before = known.plans(policy, **POLICIES[policy]), transport.group.traffic.bytes["gather"]
    results = []
    for batch in range(2):
        for index, layer in enumerate(layers):
            layer.zero_grad()
            rows, gates = step.rows(batch)[rank], step.gates(batch)[rank]
            y = layer.compute(rows, step.ids[batch][rank][:, index], gates, plan=plans[batch, index])
            assert isinstance(y, Tensor)
            y.square().sum().backward()
            outputs, gradients = step.dense_run(batch, index)
            (weights,) = layer.weights
            homes = list(weights.layout.homes)
            assert close(y, outputs[rank], 1e-12)
            assert rows.grad is not None and close(rows.grad, gradients[rank], 1e-12)  # type: ignore[arg-type]
            assert close(weights.down.grad, gradients[-1][homes], 1e-12)  # type: ignore
            results.append(tuple(layer.balancer.facts))
    return before, transport.group.traffic.bytes["gather"], len(results)


@pytest.mark.parametrize("capacity", [None, 16])
@pytest.mark.parametrize("policy", ["exact", "llep"])
def test_nothing_is_gathered_within_a_step(policy: str, capacity: int | None) -> None:
    for before, after, steps in run_ranks(process, RANKS, policy, capacity):
        assert before == after > 0 and steps == 4


def other_micro_batch(rank: int, plans: Any, step: Step) -> tuple[KnownPlan, Tensor, int]:
    """Rank 1 takes plan and rows of the other micro-batch."""
    batch = int(rank == 1)
    return plans[batch, 0], step.ids[batch][rank][:, 0], batch


def other_rows(rank: int, plans: Any, step: Step) -> tuple[KnownPlan, Tensor, int]:
    batch = int(rank == 1)
    return plans[0, 0], step.ids[batch][rank][:, 0], batch


def no_plan(rank: int, plans: Any, step: Step) -> tuple[Any, Tensor, int]:
    return "plan" if rank == 1 else plans[0, 0], step.ids[0][rank][:, 0], 0


FAULTS: dict[str, Callable[..., Any]] = {
    "checksum of the plan must be the same on all ranks": other_micro_batch,
    r"rank 1 has \d+ copies of expert \d+, the plan was made for|rank 1 failed in stage count": other_rows,
    "must be one of KnownRoutes.plans\\(\\), got str|rank 1 failed in stage count": no_plan,
}


def faulty(rank: int, message: str, capacity: int | None) -> None:
    step = make_step()
    transport = CollectiveTransport(step.placement.topology, max_tokens_per_rank=capacity)
    layer = layers_of(step, transport)[0]
    plans = KnownRoutes(step.ids, step.placement).plans()
    plan, ids, batch = FAULTS[message](rank, plans, step)
    layer.compute(step.rows(batch)[rank], ids, step.gates(batch)[rank], plan=plan)


@pytest.mark.parametrize("capacity", [None, 16])
@pytest.mark.parametrize("message", FAULTS)
def test_all_ranks_raise(message: str, capacity: int | None) -> None:
    for outcome in rank_outcomes(faulty, RANKS, message, capacity, group_timeout=10.0):
        assert outcome.error is not None
        last = outcome.error.strip().splitlines()[-1]
        assert last.startswith("ValueError: ") and re.search(message, last), outcome.error


def test_a_stack_that_predicts_takes_no_plan() -> None:
    step = make_step()
    layers = layers_of(step, LocalTransport(step.placement.topology), policy="llep")
    plans = KnownRoutes(step.ids, step.placement).plans("llep")
    stack = isoload.LibraStack(layers, None)
    with torch.no_grad(), pytest.raises(ValueError, match="plan needs a LibraStack with predict='known'"):
        run(layers[0], step, 0, plans[0, 0])
    stack.close()
    run(layers[0], step, 0, plans[0, 0])


@pytest.mark.parametrize("capacity", [None, 16])
@pytest.mark.parametrize(("policy", "stack"), [("exact", False), ("llep", False), ("llep", True)])
def test_the_host_waits_for_row_counts_alone(policy: str, stack: bool, capacity: int | None) -> None:
    """On a fake GPU: plans are made without a wait, and the step waits for dispatch's split sizes or not at all."""
    step = make_step()
    topology, how = step.placement.topology, POLICIES[policy]
    dtype = torch.bfloat16
    dense = ExpertWeights(*(getattr(step.dense[0], name).to(dtype) for name in STACKS))
    rows = [row.detach().to(dtype) for row in step.rows(0)]
    gates = [gate.detach().float() for gate in step.gates(0)]
    transport = LocalTransport(topology, capacity)
    first = MoE(no_gate, dense, transport, step.placement, policy=policy, **how)
    first.compute(
        rows, step.layer_ids(0, 0), gates
    )  # which agrees on what later batches do not compare again
    repeated_placement(step.placement, 2)  # kept from step to step
    with HostWaits(answer) as host, torch.no_grad(), kept_memos():
        dense, *rest = (
            ExpertWeights(
                *(torch.zeros(getattr(dense, n).shape, dtype=dtype, device="cuda") for n in STACKS)
            ),
            [torch.zeros(row.shape, dtype=dtype, device="cuda") for row in rows],
            [torch.zeros(gate.shape, device="cuda") for gate in gates],
        )
        rows, gates = rest
        layers = [MoE(no_gate, dense, transport, step.placement, i, policy, **how) for i in range(LAYERS)]
        device = dense.down.device
        for layer in layers:
            layer.balancer._own[device] = layer.balancer.placed_on(device)
        if stack:
            isoload.LibraStack(layers, "known")
        routes = [
            [torch.zeros(ids.shape, dtype=torch.int64, device="cuda") for ids in of_ranks]
            for of_ranks in step.ids
        ]
        with patch.object(KnownRoutes, "_set", set_loads):
            known = KnownRoutes(routes, step.placement)
        host.waits.clear()
        plans = known.plans(policy, **how).layers(0)
        # The placement's tables, which no cache may hold while tensors are fake
        assert all(wait.startswith("copy cpu to cuda in placement/") for wait in host.waits), host.waits
        for _ in range(2):
            host.waits.clear()
            for i, layer in enumerate(layers):
                layer.compute(rows, [ids[:, i] for ids in routes[0]], gates, plan=plans[i])
        assert short((host.waits, 0))[0] == wanted(capacity)[0] * LAYERS


def set_loads(known: KnownRoutes, loads: Tensor) -> None:
    known.loads, known.numbers = loads, [[0] * LAYERS] * len(loads)
