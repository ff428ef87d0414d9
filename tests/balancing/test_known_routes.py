"""Loads and plans of a step's known routes are those that the layers would have gathered and made."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, KnownRoutes, LocalGroup, Topology
from isoload.balancing.known_routes import KnownPlans
from isoload.policies.plan import Plan
from isoload.traces import Identity, Trace, read_routes
from isoload.transport import Call
from support.known_step import EXPERTS, LAYERS, RANKS, TOKENS, Step, make_step
from support.processes import run_ranks

NEEDS_SHARED = {"shared_local", "waterfill", "waterfill_sampled", "joint"}
SHARED = {name: 1 if name in NEEDS_SHARED else 0 for name in isoload.POLICIES}
IN_ORDER: dict[str, dict[str, Any]] = {"llep_published": {"replicas": 0, "spare": 12}}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and left.equal(right)
    return bool(left == right)


def assert_same_plan(left: Plan, right: Plan) -> None:
    for field in fields(Plan):
        mine, theirs = getattr(left, field.name), getattr(right, field.name)
        if field.name == "placed":
            assert mine.host is theirs.host and mine.layer == theirs.layer
            assert mine.slot_to_expert.equal(theirs.slot_to_expert)
            assert mine.tables.data.equal(theirs.tables.data)
            assert (mine.unfilled is None) == (theirs.unfilled is None)
        elif field.name == "shared" and mine is not None:
            assert all(same(getattr(mine, f.name), getattr(theirs, f.name)) for f in fields(mine))
        else:
            assert same(mine, theirs), field.name


def step_of(policy: str, repeats: bool = False) -> Step:
    borrows = isoload.POLICIES[policy]().borrows
    how = {"spare": 2 if borrows else 0, **IN_ORDER.get(policy, {})}
    return make_step(repeats, num_shared=SHARED[policy], **how)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("policy", isoload.POLICIES)
def test_plans_and_routes_equal_those_with_a_gather(policy: str, repeats: bool) -> None:
    step = step_of(policy, repeats)
    group = LocalGroup(step.placement.topology)
    plans = KnownRoutes(step.ids, step.placement).plans(policy)
    for layer in range(LAYERS):
        how: dict[str, Any] = {"policy": policy, "group": group, "shared_columns": False}
        gathers, follows = (Balancer(step.placement, layer, **how) for _ in range(2))
        for batch in range(len(TOKENS)):
            ids = step.layer_ids(batch, layer)
            wanted = gathers.balance(ids)
            followed = follows.follow(ids, plans[batch, layer], Call(group))
            assert wanted.plan is not None and followed.plan is not None
            assert followed.loads.equal(wanted.loads) and follows.last_loads is followed.loads
            assert_same_plan(followed.plan, wanted.plan)
            assert follows.last_plan is followed.plan
            pairs = zip(follows.route(followed), gathers.route(wanted), strict=True)
            assert all(mine.equal(theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_loads_against_loops(num_shared: int) -> None:
    step = make_step(repeats=True, num_shared=num_shared)
    known = KnownRoutes(step.ids, step.placement)
    assert known.loads.shape == (2, LAYERS, RANKS, EXPERTS + num_shared)
    assert known.loads.dtype == torch.int32
    for batch, of_ranks in enumerate(step.ids):
        for rank, ids in enumerate(of_ranks):
            for layer in range(LAYERS):
                counts = [int((ids[:, layer] == e).sum()) for e in range(EXPERTS)]
                counts += [int((ids[:, layer] >= 0).any(1).sum())] * num_shared
                assert known.loads[batch, layer, rank].tolist() == counts


def test_peaks_of_a_step_and_its_texts() -> None:
    step = make_step()
    known = KnownRoutes([[ids.to(torch.uint8) % EXPERTS for ids in row] for row in step.ids], step.placement)
    plans = known.plans("exact", tolerance=0.0)
    assert plans.peak is not None and plans.peak.equal(plans.bound) and plans.bound.shape == (2, LAYERS)
    assert repr(known) == "KnownRoutes(2 micro-batches, 2 layers, 4 ranks, 16 experts)"
    assert repr(plans) == "KnownPlans(exact, 2 micro-batches x 2 layers)"
    sampled = known.plans("lp_sampled")
    assert sampled.peak is None


def test_one_call_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = make_step(), []
    policy = isoload.POLICIES["exact"]
    split = policy.split
    monkeypatch.setattr(policy, "split", lambda *args: calls.append(args) or split(*args))  # type: ignore[func-returns-value]
    plans = KnownRoutes(step.ids, step.placement).plans()
    assert all(isinstance(plans[batch, layer].plan, Plan) for batch in (0, 1) for layer in range(LAYERS))
    assert len(calls) == 1


def trace_of(step: Step) -> tuple[Trace, list[int], list[int]]:
    """The step's tokens as sequences of mixed micro-batches and ranks, in another order, layers as 3 and 4."""
    parts = [
        (part, batch, rank)
        for batch, of_ranks in enumerate(step.ids)
        for rank, ids in enumerate(of_ranks)
        for part in (ids[:4], ids[4:])
        if len(part)
    ]
    parts = parts[::2] + parts[1::2]
    trace = read_routes([part for part, _, _ in parts], first_moe_layer=3, num_experts=EXPERTS)
    return trace, [batch for _, batch, _ in parts], [rank for _, _, rank in parts]


def test_routes_of_a_trace() -> None:
    step = make_step(seed=3)
    trace, batches, ranks = trace_of(step)
    placement = step.placement.with_rows([1, 0], [4, 3], trace.identity)
    known = KnownRoutes(trace, placement, micro_batches=batches, ranks=ranks)
    loads = KnownRoutes(step.ids, step.placement).loads
    assert known.loads.equal(loads.flip(1))
    assert trace.topk_ids is not None
    for batch in range(2):
        for rank in range(RANKS):
            tokens = known.tokens(batch, rank)
            assert (np.diff(tokens) > 0).all() and len(tokens) == TOKENS[batch][rank]
            got = torch.from_numpy(trace.topk_ids[tokens]).sort(0).values
            assert got.equal(step.ids[batch][rank].sort(0).values.int())


def test_a_trace_on_one_rank_is_one_micro_batch() -> None:
    step = make_step(seed=3)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), Topology(1), EXPERTS).with_moe_layers(3)
    known = KnownRoutes(trace_of(step)[0], placement)
    assert known.loads.shape == (1, LAYERS, 1, EXPERTS)
    assert known.loads.sum() == sum(int((ids >= 0).sum()) for row in step.ids for ids in row)


def gathered_once(rank: int) -> tuple[Any, ...]:
    step = make_step()
    group = isoload.CollectiveGroup(step.placement.topology)
    known = KnownRoutes([[row[rank]] for row in step.ids], step.placement, group=group)
    whole = KnownRoutes(step.ids, step.placement, group=group)
    moved = group.traffic.bytes["gather"]
    plans, apart = known.plans("llep"), KnownRoutes(step.ids, step.placement).plans("llep")
    assert known.loads.equal(whole.loads) and known.numbers == whole.numbers
    assert plans[1, 1].rank == rank and apart[1, 1].rank is None
    balancer = Balancer(step.placement, 1, "llep", group)
    ids = step.ids[1][rank][:, 1]
    slots = [balancer.route(balancer.follow([ids], made[1, 1], Call(group)))[0] for made in (plans, apart)]
    assert group.traffic.bytes["gather"] == moved
    slots.append(Balancer(step.placement, 1, "llep", group)(ids))  # type: ignore[arg-type]
    return moved, slots[0].equal(slots[1]), slots[0].equal(slots[2])


def test_a_process_per_rank_gathers_once_for_the_step() -> None:
    size = 2 * LAYERS * EXPERTS * 4
    assert run_ranks(gathered_once, RANKS) == [(size, True, True)] * RANKS


def differing(rank: int) -> str:
    step = make_step()
    group = isoload.CollectiveGroup(step.placement.topology)
    routes = [[row[rank]] for row in step.ids][: 1 if rank == 2 else 2]
    if rank == 1:
        routes[1][0][0, 0, 0] = EXPERTS
    with pytest.raises(ValueError) as raised:
        KnownRoutes(routes, step.placement, group=group)
    return str(raised.value)


def test_all_ranks_raise() -> None:
    errors = run_ranks(differing, RANKS)
    assert errors[1] == "routes must be in -1..15, got 16"
    assert all("rank 1" in error and errors[1] in error for error in (errors[0], errors[2], errors[3]))


def plans_of(step: Step) -> KnownPlans:
    return KnownRoutes(step.ids, step.placement).plans()


def test_refused_routes() -> None:
    step = make_step()
    ids, placement = step.ids, step.placement
    trace, batches, ranks = trace_of(step)
    named = placement.with_moe_layers(3)
    known: dict[str, Any] = {"micro_batches": batches, "ranks": ranks}

    def refused(message: str, routes: Any, of: Any = placement, **how: Any) -> None:
        with pytest.raises(ValueError, match=message):
            KnownRoutes(routes, of, **how)

    refused(r"one tensor per rank \(4\), or per owned rank with a group, got \[3\]", [row[1:] for row in ids])
    refused("got none", [])
    refused(r"tensors \[T, L, K\] of integers, got \[9, 2, 3\] torch.float64", [[r.double() for r in ids[0]]])
    refused("of integers, got list", [[[1]] * 4])
    refused(r"placement's 2 layers and equal K, got \[9, 1, 3\]", [[row[:, :1] for row in ids[0]]])
    refused("equal K", [[ids[0][0][..., :2], *ids[0][1:]]])
    refused(
        "routes must be in -1..15, got 16",
        [[row + 1 + (row < 15) * 0 for row in ids[0]], [r * 0 + 16 for r in ids[1]]],
    )
    refused("routes must be in -1..15, got -2", [[row.clamp(max=0) - 1 for row in ids[0]]])
    refused("belong to routes that are a Trace, got tensors", ids, ranks=ranks)
    refused("must have topk_ids, trace t has only counts", Trace("t", 16, counts=np.ones((1, 2, 16), int)))
    refused("does not state which layers of the model", trace, **known)
    more = read_routes(trace.topk_ids, first_moe_layer=3, num_experts=32)
    refused("of the placement's 16 routed experts, trace routes has 32", more, named, ranks=[0])
    refused("placement is of a model with MoE layers 2..3, but", trace, placement.with_moe_layers(2), **known)
    refused("source rank of every sequence, 0..3, got None", trace, named, micro_batches=batches)
    refused(
        "ranks must be in 0..3, got 0..4", trace, named, micro_batches=batches, ranks=[4, *ranks[1:-1], 0]
    )
    refused(
        "micro_batches must be from 0 on, got -1", trace, named, micro_batches=[-1] * len(ranks), ranks=ranks
    )
    refused(r"one integer per sequence \(1.\), got \[1\]", trace, named, micro_batches=[0], ranks=ranks)
    refused("must have seq_id to be split", read_routes(trace.topk_ids, first_moe_layer=3), named, ranks=[0])
    one = placement.with_rows([0], [3], Identity("model"))
    refused("routes and placement must have the same layers", trace, one, **known)
    with pytest.raises(ValueError, match="tokens need routes that are a Trace"):
        KnownRoutes(ids, placement).tokens(0, 0)
    plans = plans_of(step)
    for which in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match=r"micro-batches 0..1 and layers 0..1, got \["):
            plans[which]


def test_the_op_refuses_a_plan_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host reads no counts and the same op reports this."""
    monkeypatch.setattr("isoload.balancing.known_routes.values_readable", lambda _tensor: False)
    step = make_step()
    plans = KnownRoutes(step.ids, step.placement).plans()
    layer = Balancer(step.placement, 0, group=LocalGroup(step.placement.topology))
    batch = layer.follow(step.layer_ids(1, 0), plans[0, 0], Call(layer.group))
    with pytest.raises(ValueError, match="topk_ids must hold each expert as often as its share says"):
        layer.route(batch)


def test_refused_plans() -> None:
    step = make_step()
    group = LocalGroup(step.placement.topology)
    plans, balancer = plans_of(step), Balancer(step.placement, 0, group=group)
    ids = step.layer_ids(0, 0)

    def refused(message: str, plan: Any, rows: list[Tensor] = ids, at: Balancer = balancer) -> None:
        with pytest.raises(ValueError, match=message):
            at.follow(rows, plan, Call(group))
        assert at.last_plan is None

    refused(r"these rows: rank 0 has \d+ copies of expert \d+, the plan was made for \d+", plans[1, 0])
    refused("one of KnownRoutes.plans", plans)
    refused("placement and position, 0 of Placement.*got 1 of", plans[0, 1])
    refused("placement and position, 0 of", plans_of(make_step())[0, 0])
    refused(
        "loads='gathered', got loads='own'",
        plans[0, 0],
        at=Balancer(step.placement, 0, group=group, loads="own"),
    )
    refused("one tensor per owned rank", plans[0, 0], ids[1:])
    swapped = [ids[0].flip(0), *ids[1:]]
    assert balancer.follow(swapped, plans[0, 0], Call(group)).plan is not None  # the order of rows is free
    moved = isoload.place(torch.ones(LAYERS, EXPERTS), step.placement.topology, 7, spare_slots=2)
    balancer.load(moved)
    refused("placement and position", plans[0, 0])
