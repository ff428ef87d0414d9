"""CapturedBalancer on several ranks: all capture and replay in the same batches, whatever happens on one of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CapturedBalancer, LocalGroup
from support.captured_ranks import GraphGroup, captured_gather
from support.processes import run_ranks
from support.recorded_calls import as_if_capturing, recorded
from support.small_batches import EXPERTS, K, draw_ids, make_placement, make_topology

RANKS, TOKENS = 2, 37
PLACEMENT = isoload.place(
    torch.arange(EXPERTS).expand(1, -1), isoload.Topology(RANKS), slots_per_rank=EXPERTS // 2 + 2
)
TOLD = "rank 1 failed in stage count"


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """The first call of an op in Python takes seconds: made before processes fork."""
    with as_if_capturing():
        captured_gather(torch.zeros(2, dtype=torch.int32), RANKS)


class Captures:
    """A capture that fails where `error` is set; counts its calls."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.number = error, 0

    def __call__(self, call: Callable[[], list[Tensor]]) -> Any:
        self.number += 1
        if self.error is not None:
            raise self.error
        return recorded(call)


class Ranks:
    """One rank's CapturedBalancer, and the slots that a Balancer of all ranks gives."""

    def __init__(self, rank: int, error: BaseException | None = None, **how: Any) -> None:
        self.rank, self.captures = rank, Captures(error)
        self.balancer = Balancer(PLACEMENT, 0, "exact", GraphGroup(RANKS), **how)
        self.how = how
        self.graph = CapturedBalancer(self.balancer, TOKENS, K, device="cpu", capture=self.captures)
        self.batches = itertools.count()

    def right(self, policy: str = "exact") -> None:
        """A batch that has the slots of the eager Balancer."""
        ids = draw_ids(next(self.batches))[:RANKS]
        wanted = Balancer(PLACEMENT, 0, policy, LocalGroup(RANKS), **self.how)(ids)[self.rank]
        assert torch.equal(self.graph(ids[self.rank]), wanted)

    def fails(self, given: Any = None) -> str:
        """What a batch raises, and the group's check after it."""
        ids, said = draw_ids(next(self.batches))[self.rank], ""
        try:
            self.graph(ids if given is None else given)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        try:
            self.balancer.group.check()
        except ValueError as error:
            said += f"; {error}"
        return said


def change_the_recorder(rank: int) -> int:
    ranks, recorder = Ranks(rank), isoload.Recorder(1, EXPERTS)
    for _ in range(3):
        ranks.right()
    if rank == 1:
        ranks.balancer.recorder = recorder
    for _ in range(3):
        ranks.right()
    recorder.step()
    assert ranks.captures.number == 1
    return int(recorder.counts().sum())


def test_a_rank_may_change_its_recorder() -> None:
    """Regression: it ran eagerly, and captured anew, while the other ranks replayed."""
    copies = sum(int((draw_ids(batch)[1] >= 0).sum()) for batch in (3, 4, 5))
    assert run_ranks(change_the_recorder, RANKS, group_timeout=5) == [0, copies]


class Raising:
    """In the place of a Recorder."""

    def add(self, *_given: Any) -> None:
        raise MemoryError("full")


def record_and_fail(rank: int) -> str:
    ranks = Ranks(rank)
    for _ in range(3):
        ranks.right()
    ranks.balancer.recorder = Raising() if rank else None  # type: ignore[assignment]
    said = ranks.fails()
    ranks.balancer.recorder = None
    ranks.right()
    return said


def test_a_new_recorder_that_fails_stops_all() -> None:
    first, second = run_ranks(record_and_fail, RANKS, group_timeout=5)
    assert TOLD in first and second.startswith("MemoryError: full")


def fail_to_capture(rank: int, error: Exception) -> list[str]:
    ranks = Ranks(rank, error if rank else None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(4):
            ranks.right()
    assert ranks.captures.number == 1
    ranks.captures.error = None
    ranks.graph.recapture()
    for _ in range(3):
        ranks.right()
    assert ranks.captures.number == 2
    return [str(one.message) for one in warned if "CUDA graph" in str(one.message)]


def test_if_one_rank_cannot_capture_all_run_eagerly() -> None:
    """Regression: it gathered eagerly, and the other ranks replayed."""
    (first,), (second,) = run_ranks(fail_to_capture, RANKS, OSError("no memory"), group_timeout=5)
    assert first == second
    assert first.endswith("runs eagerly: its CUDA graph failed on rank 1: OSError: no memory")


def interrupt_the_capture(rank: int) -> str:
    ranks = Ranks(rank, KeyboardInterrupt() if rank else None)
    ranks.right()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = ranks.fails()
    ranks.right()
    return said


def test_an_interrupt_of_a_capture_stops_all() -> None:
    first, second = run_ranks(interrupt_the_capture, RANKS, group_timeout=5)
    assert TOLD in first and second.startswith("KeyboardInterrupt")


def fail_in_a_batch(rank: int, number: int) -> str:
    ranks = Ranks(rank)
    for _ in range(number):
        ranks.right()
    said = ranks.fails(torch.zeros(TOKENS + 1, K, dtype=torch.int64) if rank else None)
    for _ in range(3):
        ranks.right()
    assert ranks.captures.number == 1
    return said


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_call_that_fails_stops_all_and_the_next_is_whole(number: int) -> None:
    """Regression: the rank gathered eagerly, and from the first batch on captured one batch after the others."""
    first, second = run_ranks(fail_in_a_batch, RANKS, number, group_timeout=5)
    assert TOLD in first
    assert second.startswith(
        f"ValueError: topk_ids must be [T, {K}] torch.int64 on cpu with T at most {TOKENS}"
    )


def change_the_policy(rank: int) -> str:
    ranks = Ranks(rank)
    for _ in range(3):
        ranks.right()
    ranks.balancer.policy = isoload.POLICIES["exact"]()  # an equal one
    ranks.right()
    if rank == 1:
        ranks.balancer.policy = isoload.POLICIES["even"]()
    said = ranks.fails()
    try:
        ranks.graph.recapture()
    except ValueError as error:
        said += f"; {error}"
    ranks.balancer.policy = isoload.POLICIES["even"]()
    ranks.graph.recapture()
    for _ in range(3):
        ranks.right("even")
    assert ranks.captures.number == 2
    return said


def test_a_rank_may_not_change_its_policy_alone() -> None:
    """Regression: it ran eagerly, and captured anew, while the other ranks replayed."""
    first, second = run_ranks(change_the_policy, RANKS, group_timeout=5)
    assert TOLD in first
    assert second.startswith(
        "ValueError: policy must be exact as captured, got even: call recapture() on all ranks after they set another "
        "policy"
    )
    for said in (first, second):
        assert "; policy must be the same on all ranks" in said


def test_other_nodes_are_told_of_a_failed_replay_at_the_next_exchange() -> None:
    balancer = Balancer(make_placement(), 1, "exact", LocalGroup(make_topology()), loads="node")
    graph = CapturedBalancer(balancer, TOKENS, K, device="cpu", capture=recorded)
    for batch in range(3):
        graph(draw_ids(batch))
    with pytest.raises(ValueError, match="topk_ids must have one tensor per owned rank"):
        graph(draw_ids(0)[:1])
    assert balancer.own_counts is not None
    assert (
        balancer.own_counts.failure == "ValueError: topk_ids must have one tensor per owned rank (8), got 1"
    )
