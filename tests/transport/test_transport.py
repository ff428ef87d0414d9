"""Transports: all pass the conformance suite, on virtual ranks and on forked ones, with the same bits."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import isoload
from isoload import Topology
from isoload.transport import Call, CollectiveTransport, LocalTransport, Transport, error_code
from support.batches import MAX_TOKENS, Batch, draw
from support.conformance import CASES, layer, own, send
from support.made_routing import make_workload
from support.processes import run_ranks
from support.sweeps import slow

CAPACITIES = [None, MAX_TOKENS]
SLOTS_PER_RANK = draw("default", 3).slots_per_rank


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        *product(CASES, (1, 3)),
        *slow(*((case, 8) for case in CASES)),
    ],
)
def test_local(case: str, num_ranks: int, capacity: int | None) -> None:
    CASES[case](lambda: LocalTransport(Topology(num_ranks), capacity))


@pytest.mark.slow
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("case", CASES)
def test_local_with_every_top_k(case: str, capacity: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.batches.TOP_KS", range(1, 9))
    CASES[case](lambda: LocalTransport(Topology(4), capacity))


def all_cases(rank: int, num_ranks: int, capacity: int | None) -> dict[str, str]:
    """The traceback of every case that fails; the rank goes on, as its peers do, so that each case is judged."""
    failed = {}
    for name, case in CASES.items():
        try:
            case(lambda: CollectiveTransport(Topology(num_ranks), max_tokens_per_rank=capacity))
        except AssertionError:
            failed[name] = traceback.format_exc()
    return failed


GROUPS = [(2, None), pytest.param((3, MAX_TOKENS), marks=pytest.mark.slow), *slow(((4, None),))]


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """All cases on one group of forked ranks."""
    num_ranks, capacity = request.param
    return run_ranks(all_cases, num_ranks, num_ranks, capacity)


@pytest.mark.parametrize("case", CASES)
def test_collective(case: str, failures: list[dict[str, str]]) -> None:
    for rank, failed in enumerate(failures):
        assert case not in failed, f"rank {rank}: {failed[case]}"


def balanced_step(transport: Transport, step: int) -> dict[str, Any]:
    """count, gather, plan, route and a layer on a skewed workload; the results of the transport's own ranks."""
    num_ranks, num_experts, slots_per_rank = transport.group.topology.num_ranks, 16, 6
    tokens = [29, 0, 40, 11]
    workload = make_workload(
        "zipf", num_ranks=num_ranks, num_experts=num_experts, top_k=3, tokens_per_rank=tokens, seed=5
    )
    loads_before = torch.from_numpy(workload.expert_loads(step)[None])
    placement = isoload.place(loads_before, transport.group.topology, slots_per_rank)
    transport.group.reset_traffic()
    ids = workload.topk_ids(step)
    loads = transport.group.gather_loads(own(transport, [isoload.count(i, num_experts) for i in ids]))
    plan = isoload.plan(loads, placement, 0)
    # every process routes for all ranks, to know what the others send it
    slots = [isoload.route(i, loads, plan, rank) for rank, i in enumerate(ids)]
    rng = np.random.default_rng(step)
    x = [torch.from_numpy(rng.standard_normal((t, 9))).float() for t in tokens]
    weights = [torch.from_numpy(rng.random((t, 3))).float() for t in tokens]
    batch = Batch("zipf", x, slots, weights, slots_per_rank)
    traffic = {"rows": transport.group.traffic.rows, "bytes": transport.group.traffic.bytes}
    return {"batch": batch, "quota": plan.quota, **layer(transport, batch), **traffic}


def test_a_balanced_step_is_the_same_on_processes_and_in_one() -> None:
    topology = Topology(4)

    def body(rank: int) -> list[dict[str, Any]]:
        transport = CollectiveTransport(topology)
        return [balanced_step(transport, step) for step in range(3)]

    local = LocalTransport(topology)
    for step, processes in enumerate(zip(*run_ranks(body, topology.num_ranks), strict=True)):
        expected = balanced_step(local, step)
        num_rows = expected["batch"].num_rows()
        assert np.array_equal(expected["rows"].numpy(), num_rows) and num_rows.max() > 0
        for rank, found in enumerate(processes):
            assert torch.equal(found["quota"], expected["quota"])
            assert np.array_equal(found["rows"][rank].numpy(), num_rows[rank])
            for name in ("out", "x", "weights", "scale"):
                assert torch.equal(found[name][0], expected[name][rank]), f"{name} of rank {rank}"
        for stage, count in expected["bytes"].items():
            assert count == sum(found["bytes"][stage] for found in processes), stage


def test_too_many_tokens_are_refused_on_the_host_and_told_by_the_gather() -> None:
    message = f"x of rank 1 must have at most max_tokens_per_rank={MAX_TOKENS} tokens, got {MAX_TOKENS + 1}"
    batch = draw("too many", 2, tokens=[3, MAX_TOKENS + 1])
    with pytest.raises(ValueError, match=message):
        send(LocalTransport(Topology(2), MAX_TOKENS), batch)
    with pytest.raises(ValueError, match="max_tokens_per_rank must be at least 1, got 0"):
        LocalTransport(Topology(2), 0)


def test_no_capacity_and_a_capacity_give_the_same_bits() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        batch = draw("both", 4, dtype=dtype)
        exact, fixed = (layer(LocalTransport(Topology(4), c), batch) for c in CAPACITIES)
        for name in ("out", "x", "weights"):
            assert all(torch.equal(a, b) for a, b in zip(exact[name], fixed[name], strict=True)), name


def test_float32_weights_beside_float64_rows() -> None:
    batch = draw("mixed", 3)
    grads = layer(LocalTransport(Topology(3)), batch)["weights"]
    batch.weights[:] = [w.double() for w in batch.weights]
    for single, double in zip(grads, layer(LocalTransport(Topology(3)), batch)["weights"], strict=True):
        assert single.dtype == torch.float32 and torch.equal(single, double.float())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fixed_shapes_never_wait_for_a_device(device: str) -> None:
    """On fake tensors any look at a value raises; the exact transport's one look does. Backward needs a real device."""
    tokens = [5, 0, 9]
    exact, fixed = (LocalTransport(Topology(3), c) for c in CAPACITIES)
    for transport in (exact, fixed):  # on real tensors, to agree on the facts
        layer(transport, draw("real", 3, tokens=tokens))
        transport.group.gather_loads([torch.zeros(6, dtype=torch.int32)] * 3)
    with FakeTensorMode(), torch.set_grad_enabled(device == "cpu"):
        x = [torch.zeros(t, 7, dtype=torch.float64, device=device) for t in tokens]
        slots = [torch.zeros(t, 4, dtype=torch.int64, device=device) for t in tokens]
        weights = [torch.zeros(t, 4, device=device) for t in tokens]
        for transport in (exact, fixed):
            transport.group.reset_traffic()
        if device == "cuda":  # on CPU a gather's errors are read at once
            counts = [torch.zeros(6, dtype=torch.int32, device=device)] * 3
            assert fixed.group.gather_loads(counts).device.type == device
        received = fixed.dispatcher.dispatch(x, slots, weights, SLOTS_PER_RANK)
        out = fixed.dispatcher.combine([got.rows for got in received], received)
        assert [o.shape for o in out] == [t.shape for t in x]
        if device == "cpu":
            torch.cat(out).sum().backward()
            with pytest.raises(Exception, match="tolist|item|data-dependent|_local_scalar_dense"):
                exact.dispatcher.dispatch(x, slots, weights, SLOTS_PER_RANK)
    assert fixed.group.traffic.host_syncs == 0


def test_errors_of_a_device_gather_are_raised_at_the_next_look() -> None:
    """What the host has not read yet, as on a GPU, is raised by dispatch's one look, or by check()."""
    batch = draw("late", 3)
    for capacity in CAPACITIES:
        transport = LocalTransport(Topology(3), capacity)
        transport.group._unread = torch.tensor([0, 7, -error_code("plan")], dtype=torch.int32)
        with pytest.raises(ValueError, match="rank 2 failed in stage plan"):
            send(transport, batch)
            transport.group.check()
        transport.group.check()
        transport.group._unread = torch.tensor([0, -error_code("route"), 7], dtype=torch.int32)
        with pytest.raises(ValueError, match="rank 1 failed in stage route"):  # kept by a later gather
            transport.group.gather_loads([torch.zeros(2, dtype=torch.int32)] * 3)


def test_a_failure_stands_though_the_loads_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host looks later."""
    group = LocalTransport(Topology(3)).group
    look, counts = group.check, [torch.ones(2, dtype=torch.int32)] * 3
    monkeypatch.setattr(group, "check", lambda: None)
    group.gather_loads(counts, [0, 0, error_code("plan")]).zero_()
    with pytest.raises(ValueError, match="rank 2 failed in stage plan"):
        look()


def test_a_step_leaves_nothing_behind() -> None:
    batch = draw("freed", 3)
    transport = LocalTransport(Topology(3))
    gc.disable()
    try:
        x = [value.clone().requires_grad_() for value in batch.x]
        received = transport.dispatcher.dispatch(x, batch.slots, batch.weights, batch.slots_per_rank)
        out = transport.dispatcher.combine([got.rows for got in received], received)
        torch.cat(out).sum().backward()
        alive = [weakref.ref(t) for got in received for t in (got, got.rows, got.handle)]
        del received, out
        assert not any(ref() is not None for ref in alive), "held by a cycle"
    finally:
        gc.enable()


def refused(message: str, **changes: Any) -> None:
    batch = draw("refused", 2, tokens=[3, 3], absent=0.0)
    arguments: dict[str, Any] = {
        "x": batch.x,
        "slots": batch.slots,
        "weights": batch.weights,
        "slots_per_rank": 5,
    }
    for name, change in changes.items():
        given = arguments[name]
        arguments[name] = [change(given[0]), given[1]] if isinstance(given, list) else change(given)
    with pytest.raises(ValueError) as raised:
        LocalTransport(Topology(2)).dispatcher.dispatch(**arguments)
    assert str(raised.value) == message


def test_bad_arguments_of_dispatch() -> None:
    dtypes = "torch.float64, torch.float32, torch.bfloat16, torch.float16"
    refused(f"x of rank 0 must be [T, H] of {dtypes}, got [3, 7] torch.int64", x=Tensor.long)
    refused(f"x of rank 0 must be [T, H] of {dtypes}, got [21] torch.float64", x=Tensor.flatten)
    refused("slots of rank 0 must be [3, K], K >= 1, got [2, 4]", slots=lambda s: s[:2])
    refused("slots of rank 0 must be [3, K], K >= 1, got [3, 0]", slots=lambda s: s[:, :0])
    refused("slots of rank 0 must be int32 or int64, got torch.float32", slots=Tensor.float)
    refused("slots of rank 0 must be in -1..9, got 10", slots=lambda s: s * 0 + 10)
    refused("slots of rank 0 must be in -1..9, got -2", slots=lambda s: s * 0 - 2)
    refused("weights of rank 0 must be [3, 4] as slots, got [3, 3]", weights=lambda w: w[:, :3])
    refused(
        "weights of rank 0 must be float32 (or float64 with float64 x), got torch.float16",
        weights=Tensor.half,
    )
    refused("slots_per_rank must be at least 1, got 0", slots_per_rank=lambda s: 0)
    message = "x, slots and weights of rank 0 must be on one device, got cpu, meta, cpu"
    refused(message, slots=lambda s: s.to("meta"))


def test_a_started_dispatch_carries_no_gradients() -> None:
    batch = draw("started", 2)
    dispatcher = LocalTransport(Topology(2)).dispatcher
    with pytest.raises(
        ValueError, match="start_dispatch must run under torch.no_grad.., got gradients recorded"
    ):
        dispatcher.start_dispatch(batch.x, batch.slots, batch.weights, batch.slots_per_rank)


def test_other_facts_travel_with_the_row_counts() -> None:
    """One more column of an exchange that is there anyway; in one process the ranks give the same facts."""
    transport, batch, sent = LocalTransport(Topology(3)), draw("facts", 3), []
    for facts in ({}, {"batch": 4, "placement": 2**55}):
        transport.group.reset_traffic()
        call = Call(transport.group, facts=facts)
        transport.dispatcher.dispatch(batch.x, batch.slots, batch.weights, batch.slots_per_rank, call)
        sent.append(transport.group.traffic.bytes["dispatch row counts"])
        assert transport.group.traffic.host_syncs == 1
    assert sent == [3 * 3 * 8 * (3 + 5), 3 * 3 * 8 * (3 + 5 + 2)]


def test_bad_arguments_of_the_rest() -> None:
    transport = LocalTransport(Topology(2))
    batch = draw("refused", 2, tokens=[3, 3], absent=0.0)
    received = send(transport, batch)
    rows = [got.rows for got in received]
    count = len(rows[0])
    counts = [torch.zeros(4, dtype=torch.int32)] * 2
    calls: list[tuple[str, Callable[[], object]]] = [
        (
            "y must have one entry per owned rank (2), got 1",
            lambda: transport.dispatcher.combine(rows[:1], received),
        ),
        (
            "received must have one entry per owned rank (2), got 0",
            lambda: transport.dispatcher.combine(rows, []),
        ),
        (
            f"y of rank 0 must be [{count}, 7] torch.float64 as the received rows, got [{count}, 7] torch.float32",
            lambda: transport.dispatcher.combine([rows[0].float(), rows[1]], received),
        ),
        (
            f"y of rank 1 must be [{len(rows[1])}, 7] torch.float64 as the received rows, got [0, 7] torch.float64",
            lambda: transport.dispatcher.combine([rows[0], rows[1][:0]], received),
        ),
        (
            f"own of rank 1 must be [3, 7] torch.float64 as the rank's tokens, got [{count}, 7] torch.float64",
            lambda: transport.dispatcher.combine(rows, received, [batch.x[0], rows[0]]),
        ),
        (
            "own must have one entry per owned rank (2), got 1",
            lambda: transport.dispatcher.combine(rows, received, batch.x[:1]),
        ),
        (
            "received must come from this dispatcher's dispatch, got a str",
            lambda: transport.dispatcher.combine(rows, [replace(got, handle="row 7") for got in received]),
        ),
        (
            "counts of rank 0 must be [E] int32, got [4] torch.int64",
            lambda: transport.group.gather_loads([counts[0].long(), counts[1]]),
        ),
        (
            "counts must have one entry per owned rank (2), got 1",
            lambda: transport.group.gather_loads(counts[:1]),
        ),
        (
            "errors must have one entry per owned rank (2), got 3",
            lambda: transport.group.gather_loads(counts, [0] * 3),
        ),
        (
            "rank 0 failed in stage of code 99, so all ranks stop",
            lambda: transport.group.gather_loads(counts, [99, 1]),
        ),
        (
            "stage must be one of count, plan, route, dispatch, experts, combine, placement, got 'x'",
            lambda: error_code("x"),
        ),
    ]
    for message, call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value).startswith(message), raised.value


def gathers(rank: int) -> list[int]:
    """Collectives of two gathers: of a row in the frame, of the largest such row, of a larger one; of one in a node."""
    from isoload.transport import collective

    group = collective.CollectiveGroup(Topology(2, 1))
    counted, gather = [0], collective._all_gather

    def count_calls(*given: Any, **how: Any) -> Any:
        counted[-1] += 1
        return gather(*given, **how)

    collective._all_gather = count_calls
    for size in (3, (collective.FRAME - collective.HEADER) // 4, collective.FRAME):
        row = torch.arange(size, dtype=torch.int32) + rank
        wanted = torch.stack([torch.arange(size) + other for other in range(2)])
        for gathered in (group.gather("test", [row]), group.start_gather("test", [row])()):
            assert gathered.dtype == torch.int32 and torch.equal(gathered.long(), wanted)
        counted.append(0)
    group.join_node()
    alone = group._gather("test", [torch.ones(5, dtype=torch.int64)], in_node=True)
    assert alone.sum(1).tolist() == [5 * (rank == 0), 5 * (rank == 1)]
    return counted


def test_a_row_that_fits_travels_with_the_stage() -> None:
    assert run_ranks(gathers, 2) == [[2, 2, 4, 1]] * 2
