"""One rank's failure is every rank's: raised, refused, killed or stuck, at every stage and by its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isoload import Topology
from isoload.transport import STAGES, Call, CollectiveTransport, error_code
from support.batches import MAX_TOKENS, Batch, draw
from support.conformance import own, send
from support.processes import die, rank_outcomes, run_ranks

CAPACITIES = [None, MAX_TOKENS]
GROUP_TIMEOUT = 5.0


def errors_of(body: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[str]:
    """The last line of every rank's exception, or how else it ended."""
    outcomes = rank_outcomes(body, num_ranks, *args, group_timeout=GROUP_TIMEOUT, **options)
    assert all(o.error is not None for o in outcomes), f"ranks without an error: {outcomes}"
    return [o.error.strip().splitlines()[-1] for o in outcomes]


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_before_the_gather_is_raised_on_every_rank(stage: str) -> None:
    def body(rank: int) -> None:
        transport = CollectiveTransport(Topology(3))
        counts = [torch.arange(5, dtype=torch.int32)]
        assert transport.group.gather_loads(counts).shape == (3, 5)
        transport.group.gather_loads(counts, [error_code(stage) if rank == 1 else 0])

    told = f"ValueError: rank 1 failed in stage {stage}, so all ranks stop; see the error of that rank"
    assert errors_of(body, 3) == [told] * 3


def test_a_bad_argument_of_dispatch_is_raised_on_every_rank() -> None:
    def body(rank: int) -> None:
        batch = draw("bad slots", 3, tokens=[4, 4, 4], absent=0.0)
        if rank == 2:
            batch.slots[rank][1, 1] = 99
        send(CollectiveTransport(Topology(3)), batch)

    told = "ValueError: rank 2 failed in stage dispatch, so all ranks stop; see the error of that rank"
    last = 3 * draw("bad slots", 3).slots_per_rank - 1
    assert errors_of(body, 3) == [told, told, f"ValueError: slots of rank 2 must be in -1..{last}, got 99"]


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": (
        {"hidden": 8},
        "hidden size of x must be the same on all ranks, got 7 on rank 0 and 8 on rank 1",
    ),
    "dtype": (
        {"dtype": torch.float32},
        "dtype of x must be the same on all ranks, got torch.float64 on rank 0 and torch.float32 on rank 1",
    ),
    "top-k": ({"top_k": 3}, "top-k of slots must be the same on all ranks, got 4 on rank 0 and 3 on rank 1"),
}


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("fact", DIFFERENT)
def test_ranks_that_differ_raise_alike(fact: str, capacity: int | None) -> None:
    options, message = DIFFERENT[fact]

    def body(rank: int) -> None:
        send(
            CollectiveTransport(Topology(2), max_tokens_per_rank=capacity),
            draw(fact, 2, **(options if rank == 1 else {})),
        )

    assert errors_of(body, 2) == [f"ValueError: {message}"] * 2


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_ranks_that_differ_in_weights_or_slots_raise_alike(capacity: int | None) -> None:
    for change, name in (("double", "dtype of weights"), ("slots", "slots_per_rank")):
        batch = draw(change, 2)
        other = Batch(change, batch.x, batch.slots, batch.weights, batch.slots_per_rank + 1)
        if change == "double":
            other = Batch(
                change, batch.x, batch.slots, [w.double() for w in batch.weights], batch.slots_per_rank
            )

        def body(rank: int, mine: Batch = batch, its: Batch = other) -> None:
            transport = CollectiveTransport(Topology(2), max_tokens_per_rank=capacity)
            send(transport, its if rank == 1 else mine)

        for error in errors_of(body, 2):
            assert error.startswith(f"ValueError: {name} must be the same on all ranks"), error


def test_ranks_that_differ_in_other_facts_raise_alike() -> None:
    batch = draw("facts", 3, absent=0.0)

    def body(rank: int, fails: bool) -> None:
        transport = CollectiveTransport(Topology(3))
        facts = {"layer": 2, "batch": 7 + (rank == 1)}
        call = Call(transport.group, "count", torch.device("cpu"), facts)
        if fails and rank == 1:
            call.failure = OSError("disk full")
            transport.dispatcher.carry_failure(call)
        x, slots, weights = ([values[rank]] for values in (batch.x, batch.slots, batch.weights))
        transport.dispatcher.dispatch(x, slots, weights, batch.slots_per_rank, call)

    told = "ValueError: batch must be the same on all ranks, got 7 on rank 0 and 8 on rank 1"
    assert errors_of(body, 3, False) == [told] * 3
    failed = "ValueError: rank 1 failed in stage count, so all ranks stop; see the error of that rank"
    assert errors_of(body, 3, True) == [failed, "OSError: disk full", failed]


def test_ranks_that_differ_in_construction_or_experts_raise_alike() -> None:
    def topologies(rank: int) -> None:
        CollectiveTransport(Topology(2, ranks_per_node=1 + rank))

    def capacities(rank: int) -> None:
        CollectiveTransport(Topology(2), max_tokens_per_rank=[None, 3][rank])

    def too_few(rank: int) -> None:
        CollectiveTransport(Topology(3))

    def experts(rank: int) -> None:
        CollectiveTransport(Topology(2)).group.gather_loads([torch.zeros(4 + rank, dtype=torch.int32)])

    first, second = errors_of(topologies, 2)
    assert first == second and first.startswith(
        "ValueError: topology must be the same on all ranks, got Topology"
    )
    different = "must be the same on all ranks, got"
    for body, message in (
        (capacities, f"max_tokens_per_rank {different} None on rank 0 and 3 on rank 1"),
        (too_few, "topology must have the group's 2 ranks, got 3"),
        (experts, f"length of counts {different} 4 on rank 0 and 5 on rank 1"),
    ):
        assert errors_of(body, 2) == [f"ValueError: {message}"] * 2


def fail_at(rank: int, stage: str, fail: Callable[[], None], capacity: int | None) -> None:
    """One layer of three ranks, on which rank 1 fails as it comes to the stage."""
    transport = CollectiveTransport(Topology(3), max_tokens_per_rank=capacity)
    batch = draw("failing", 3, absent=0.0)
    mine = [leaf.requires_grad_() for leaf in own(transport, batch.x)]

    def reach(name: str) -> None:
        if name == stage and rank == 1:
            fail()

    reach("gather")
    transport.group.gather_loads([torch.zeros(4, dtype=torch.int32)])
    reach("dispatch")
    received = transport.dispatcher.dispatch(
        mine, own(transport, batch.slots), own(transport, batch.weights), batch.slots_per_rank
    )
    y = received[0].rows * 2
    y.register_hook(lambda grad: reach("dispatch backward"))
    reach("combine")
    out = transport.dispatcher.combine([y], received)[0]
    out.register_hook(lambda grad: reach("combine backward"))
    out.sum().backward()


def raise_os_error() -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("fail", [die, raise_os_error])
@pytest.mark.parametrize("stage", ["gather", "dispatch", "combine", "combine backward", "dispatch backward"])
def test_a_rank_that_is_gone_fails_the_others_at_its_stage(
    stage: str, fail: Callable[[], None], capacity: int | None
) -> None:
    start = time.monotonic()
    first, gone, last = errors_of(fail_at, 3, stage, fail, capacity)
    assert gone == ("ended with exit code -9" if fail is die else "OSError: disk full")
    for rank, error in ((0, first), (2, last)):
        assert error.startswith(f"RuntimeError: stage {stage}") and f"failed on rank {rank}:" in error, error
    assert time.monotonic() - start < 2 * GROUP_TIMEOUT


@pytest.mark.slow
def test_a_rank_that_is_stuck_fails_the_others_after_the_timeout() -> None:
    def body(rank: int) -> None:
        fail_at(rank, "combine", lambda: time.sleep(30), None)

    outcomes = rank_outcomes(body, 3, group_timeout=1.0, timeout=4.0)
    assert outcomes[1].error == "did not end in time and was killed"
    for rank in (0, 2):
        assert f"RuntimeError: stage combine failed on rank {rank}:" in (outcomes[rank].error or "")


def test_ranks_that_fail_are_shown_with_their_tracebacks() -> None:
    with pytest.raises(AssertionError, match="--- rank 1 of 2: Traceback(.|\n)*OSError: disk full"):
        run_ranks(lambda rank: raise_os_error() if rank else None, 2)
