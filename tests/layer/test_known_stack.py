"""A stack of layers whose plans are known: the dense model's results, and the next plan's experts travel ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import isoload
from isoload import KnownRoutes, MoE
from isoload.balancing.known_routes import KnownPlans
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.weights.backends import AllToAll, BorrowPlan
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU
from support.borrowed_layer import close
from support.known_step import RANKS, STACKS, TOKENS, Step, make_step
from support.processes import rank_outcomes, run_ranks

LAYERS, BATCHES = 4, len(TOKENS)
LLEP = {"policy": "llep", "min_chunk": 1, "threshold": 1.0}
Rows = list[Tensor]


def no_gate(_rows: Tensor) -> Any:
    raise AssertionError("the routes are given")


def stacked(step: Step, transport: Transport, **how: Any) -> tuple[list[MoE], isoload.LibraStack]:
    how = {"policy": "exact", "borrow": "all_to_all", **how}  # the layers' own policy borrows nothing
    layers = [MoE(no_gate, step.dense[i], transport, step.placement, i, **how) for i in range(LAYERS)]
    return layers, isoload.LibraStack(layers, "known")


def run_model(
    layers: list[MoE], step: Step, plans: KnownPlans, batch: int, rows: Rows, recompute: bool | None = None
) -> Rows:
    """rows + layer(rows) in every layer; recompute: with a checkpoint, use_reentrant or not."""
    for index, layer in enumerate(layers):

        def forward(*rows: Tensor, index: int = index, layer: MoE = layer) -> tuple[Tensor, ...]:
            ids, gates = step.layer_ids(batch, index), step.gates(batch)
            ys = layer.compute(list(rows), ids, gates, plan=plans[batch, index])
            return tuple(row + y for row, y in zip(rows, ys, strict=True))

        rows = list(
            forward(*rows) if recompute is None else checkpoint(forward, *rows, use_reentrant=recompute)
        )
    return rows


def dense_model(step: Step, batch: int) -> tuple[Rows, Rows, list[list[Tensor]]]:
    """Outputs, gradients of the rows, and of every layer's stacks, for the loss sum(y ** 2)."""
    rows = first = step.rows(batch)
    stacks = [[getattr(dense, name).clone().requires_grad_() for name in STACKS] for dense in step.dense]
    for index in range(LAYERS):
        ids, gates = step.layer_ids(batch, index), step.gates(batch)
        group = ExpertWeights(*stacks[index])
        rows = [
            row + run_experts(row, of_rank, gate, [group], SwiGLU())
            for row, of_rank, gate in zip(rows, ids, gates, strict=True)
        ]
    torch.cat(rows).square().sum().backward()
    gradients = [[stack.grad for stack in of_layer] for of_layer in stacks]
    return rows, [row.grad for row in first], gradients  # type: ignore[misc, return-value]


def assert_dense(step: Step, batch: int, layers: list[MoE], leaves: Rows, ys: Rows) -> None:
    outputs, of_rows, of_stacks = dense_model(step, batch)
    assert all(close(y, wanted, 1e-12) for y, wanted in zip(ys, outputs, strict=True))
    for leaf, wanted in zip(leaves, of_rows, strict=True):
        assert leaf.grad is not None and close(leaf.grad, wanted, 1e-12)
    for layer, gradients in zip(layers, of_stacks, strict=True):
        for rank in layer.weights:
            homes = list(rank.layout.homes)
            for name, wanted in zip(STACKS, gradients, strict=True):
                assert close(getattr(rank, name).grad, wanted[homes], 1e-12)


@contextmanager
def watched(plans: KnownPlans) -> Iterator[list[str]]:
    """What starts when: "fetch (micro-batch, layer)" of the plans' experts, and "experts" of a layer's forward."""
    log: list[str] = []
    places = [(batch, layer) for batch in range(BATCHES) for layer in range(LAYERS)]
    start, run_local = AllToAll.start, MoE.run_local

    def noted_start(self: AllToAll, stage: str, plan: BorrowPlan, *parts: Any) -> Any:
        same = [
            p for p in places if plans[p].plan.slot_to_expert.data_ptr() == plan.slot_to_expert.data_ptr()
        ]
        log.append(f"{stage} {same}".replace("[", "").replace("]", ""))
        return start(self, stage, plan, *parts)

    def noted_run(self: MoE, *parts: Any) -> Any:
        log.append(f"experts {self.balancer.layer}")
        return run_local(self, *parts)

    with patch.object(AllToAll, "start", noted_start), patch.object(MoE, "run_local", noted_run):
        yield log


@pytest.mark.parametrize(("borrow", "replicas"), [("all_to_all", 0), ("pull", 1)])
@pytest.mark.parametrize("recompute", [None, False, True])
def test_training_equals_the_dense_model(recompute: bool | None, borrow: str, replicas: int) -> None:
    """With repeated ids, masked rows and an empty rank, every micro-batch's backward after its forward."""
    step = make_step(repeats=True, replicas=replicas, layers=LAYERS)
    layers, _ = stacked(step, LocalTransport(step.placement.topology), borrow=borrow)
    plans = KnownRoutes(step.ids, step.placement).plans(**LLEP)  # type: ignore[arg-type]
    for batch in range(BATCHES):
        leaves = step.rows(batch)
        for layer in layers:
            layer.zero_grad()
        ys = run_model(layers, step, plans, batch, leaves, recompute)
        torch.cat(ys).square().sum().backward()
        assert_dense(step, batch, layers, leaves, ys)
        assert all(layer.last_plan is not None for layer in layers)
    assert layers[0].group.traffic.bytes["gather"] == 0


def test_two_micro_batches_in_flight() -> None:
    step = make_step(replicas=0, layers=LAYERS)
    layers, _ = stacked(step, LocalTransport(step.placement.topology))
    plans = KnownRoutes(step.ids, step.placement).plans(**LLEP)  # type: ignore[arg-type]
    leaves = [step.rows(batch) for batch in range(BATCHES)]
    outputs = [run_model(layers, step, plans, batch, rows) for batch, rows in enumerate(leaves)]
    for batch in range(BATCHES):
        for layer in layers:
            layer.zero_grad()
        torch.cat(outputs[batch]).square().sum().backward()
        assert_dense(step, batch, layers, leaves[batch], outputs[batch])


FORWARD = [
    "borrow (0, 0)", "borrow (0, 1)", "experts 0", "borrow (0, 2)", "experts 1", "borrow (0, 3)", "experts 2",
]  # fmt: skip


def test_experts_travel_one_layer_ahead_across_micro_batches() -> None:
    step = make_step(replicas=0, layers=LAYERS)
    layers, _ = stacked(step, LocalTransport(step.placement.topology))
    plans = KnownRoutes(step.ids, step.placement).plans(**LLEP)  # type: ignore[arg-type]
    with torch.no_grad(), watched(plans) as log:
        for batch in range(BATCHES):
            run_model(layers, step, plans, batch, step.rows(batch))
    rest = [line.replace("(0", "(1") for line in FORWARD[1:]]
    assert log == [*FORWARD, "borrow (1, 0)", "experts 3", *rest, "experts 3"]


@pytest.mark.parametrize("recompute", [None, False, True])
def test_experts_travel_ahead_in_backward(recompute: bool | None) -> None:
    """Layers 3 and 2 still have theirs in the two buffers; then layer 0's micro-batch 1 is fetched."""
    step = make_step(replicas=0, layers=LAYERS)
    layers, _ = stacked(step, LocalTransport(step.placement.topology))
    plans = KnownRoutes(step.ids, step.placement).plans(**LLEP)  # type: ignore[arg-type]
    with watched(plans) as log:
        leaves = step.rows(0)
        ys = run_model(layers, step, plans, 0, leaves, recompute)
        forward = len(log)
        torch.cat(ys).square().sum().backward()
        fetched = [line for line in log[forward:] if line.startswith("borrow")]
        backward = list(fetched)
        run_model(layers, step, plans, 1, step.rows(1), recompute)
    if recompute is not True:  # without gradients in the first forward, the next micro-batch is expected
        assert log[:forward] == [*FORWARD, "experts 3"]
        assert [line.rsplit("borrow", 1)[1][-6:] for line in backward] == ["(0, 1)", "(0, 0)", "(1, 0)"]
    else:
        assert [line[-6:] for line in backward][-3:] == ["(0, 1)", "(0, 0)", "(1, 0)"]
    assert not any(line.endswith("borrow (1, 0)") for line in log[forward + len(backward) :][3:])


def test_changed_weights_are_fetched_again() -> None:
    """An optimizer step after the last layer's forward: what travelled ahead is not used."""
    step = make_step(replicas=0, layers=LAYERS)
    layers, _ = stacked(step, LocalTransport(step.placement.topology))
    plans = KnownRoutes(step.ids, step.placement).plans(**LLEP)  # type: ignore[arg-type]
    with torch.no_grad():
        run_model(layers, step, plans, 0, step.rows(0))
        for layer, dense in zip(layers, step.dense, strict=True):
            for parameter in layer.expert_parameters():
                parameter.mul_(2)
            for name in STACKS:
                getattr(dense, name).mul_(2)
        ys = run_model(layers, step, plans, 1, step.rows(1))
    outputs, *_ = dense_model(step, 1)
    assert all(close(y, wanted, 1e-12) for y, wanted in zip(ys, outputs, strict=True))


def process(rank: int, capacity: int | None) -> tuple[int, int]:
    step = make_step(replicas=0, layers=LAYERS)
    transport = CollectiveTransport(step.placement.topology, max_tokens_per_rank=capacity)
    layers, _ = stacked(step, transport)
    known = KnownRoutes([[row[rank]] for row in step.ids], step.placement, group=transport.group)
    plans, before = known.plans(**LLEP), transport.group.traffic.bytes["gather"]  # type: ignore[arg-type]
    for batch in range(BATCHES):
        for layer in layers:
            layer.zero_grad()
        rows = first = step.rows(batch)[rank]
        for index, layer in enumerate(layers):
            ids, gates = step.ids[batch][rank][:, index], step.gates(batch)[rank]
            rows = rows + layer.compute(rows, ids, gates, plan=plans[batch, index])  # type: ignore[operator]
        rows.square().sum().backward()
        outputs, of_rows, of_stacks = dense_model(step, batch)
        assert close(rows, outputs[rank], 1e-12) and close(first.grad, of_rows[rank], 1e-12)  # type: ignore
        for layer, gradients in zip(layers, of_stacks, strict=True):
            (weights,) = layer.weights
            assert close(weights.down.grad, gradients[-1][list(weights.layout.homes)], 1e-12)  # type: ignore
    return before, transport.group.traffic.bytes["gather"]


@pytest.mark.parametrize("capacity", [None, 16])
def test_processes_gather_nothing_within_a_step(capacity: int | None) -> None:
    assert all(before == after > 0 for before, after in run_ranks(process, RANKS, capacity))


def faulty(rank: int, fault: str) -> None:
    step = make_step(replicas=0, layers=LAYERS)
    transport = CollectiveTransport(step.placement.topology)
    layers, stack = stacked(step, transport)
    known = KnownRoutes(step.ids, step.placement)
    chunk = 2 if fault == "policy" and rank == 1 else 1
    plans = known.plans("llep", min_chunk=chunk, threshold=1.0)
    with torch.no_grad():
        for index, layer in enumerate(layers):
            if fault == "forgotten" and (rank, index) == (1, 1):
                stack.forget()
            plan = None if fault == "no plan" and (rank, index) == (1, 1) else plans[0, index]
            ids, gates = step.ids[0][rank][:, index], step.gates(0)[rank]
            layer.compute(step.rows(0)[rank], ids, gates, plan=plan)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("policy", "checksum of the plan must be the same on all ranks"),
        ("forgotten", "weights fetched ahead must be the same on all ranks"),
        ("no plan", r"must be one of KnownRoutes.plans\(\), got NoneType|rank 1 failed in stage count"),
    ],
)
def test_all_ranks_raise(fault: str, message: str) -> None:
    for outcome in rank_outcomes(faulty, RANKS, fault, group_timeout=10.0):
        assert outcome.error is not None
        last = outcome.error.strip().splitlines()[-1]
        with pytest.raises(ValueError, match=message):
            raise ValueError(last)


def test_refused() -> None:
    step = make_step(replicas=0, layers=LAYERS)
    layers, stack = stacked(step, LocalTransport(step.placement.topology))
    stack.close()
    with pytest.raises(
        ValueError, match="local must be 'planned' for predict='known', got 'held'|local='held' needs"
    ):
        isoload.LibraStack(layers, "known", local="held")
    with pytest.raises(ValueError, match="slots must be None where predict is 'known', got 1"):
        isoload.LibraStack(layers, "known", slots=1)
    with pytest.raises(ValueError, match=r"predict must not be 'known' in from_decoder.*routes= and plans="):
        isoload.LibraStack.from_decoder([torch.nn.Linear(1, 1)], 2, predict="known")
    stack = isoload.LibraStack(layers, "known")
    assert repr(stack.known) and stack.predictor_inputs is None
