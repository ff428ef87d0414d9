"""A rank that fails fails the whole layer's ranks: wherever it raises or dies, the others stop and name the stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isoload.balancing import balancer
from isoload.layer import moe
from isoload.policies import Policy
from isoload.transport import CollectiveTransport
from isoload.weights.experts import SwiGLU
from support.processes import die, rank_outcomes
from support.small_layer import make_setup
from support.sweeps import slow

RANKS, FAILING = 3, 1
GROUP_TIMEOUT = 5.0
# Where rank 1 fails: the exchange that the other ranks are in, or come to next
EXCHANGE = {
    "count": "gather",
    "gather": "gather",
    "plan": "dispatch",
    "route": "dispatch",
    "dispatch": "dispatch",
    "experts": "combine",
    "combine": "combine",
    "combine backward": "combine backward",
    "experts backward": "replica gradients",
    "replica gradients": "replica gradients",
    "dispatch backward": "dispatch backward",
    "refresh": "refresh",
}
Fail = Callable[[], None]


def run_steps(rank: int, stage: str, fail: Fail, capacity: int | None) -> None:
    """A training step of the layer that succeeds, then one in which rank 1 fails as it comes to the stage."""
    armed = False

    def reach(name: str) -> None:
        if armed and name == stage and rank == FAILING:
            fail()

    def reached_first(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **how: Any) -> Any:
            reach(name)
            return call(*args, **how)

        return both

    def activation(gate_up: torch.Tensor) -> torch.Tensor:
        reach("experts")
        inner = SwiGLU()(gate_up)
        inner.register_hook(lambda grad: reach("experts backward"))
        return inner

    setup = make_setup(RANKS)
    transport = CollectiveTransport(setup.topology, max_tokens_per_rank=capacity)
    group = transport.group
    send, start_send, send_back = group.send, group.start_send, group.send_back
    group.send = lambda name, *how: reach(name) or send(name, *how)
    group.start_send = lambda name, *how: reach(name) or start_send(name, *how)
    group.send_back = lambda name, *how: reach(name) or send_back(name, *how)
    group.gather_loads = reached_first("gather", group.gather_loads)
    Policy.plan = reached_first("plan", Policy.plan)  # type: ignore[method-assign]
    balancer.route_counted = reached_first("route", balancer.route_counted)
    gate = reached_first("count", setup.gate)
    layer = moe.MoE(gate, setup.dense, transport, setup.placement, activation=activation)

    def train() -> None:
        layer(setup.rows[rank]).sum().backward()
        layer.refresh_replicas()

    train()
    armed = True
    train()


def last_lines(stage: str, fail: Fail, capacity: int | None) -> list[str]:
    """The end of every rank's exception; a rank that outlives the group's timeout is killed and says so."""
    outcomes = rank_outcomes(
        run_steps, RANKS, stage, fail, capacity, timeout=GROUP_TIMEOUT + 5, group_timeout=GROUP_TIMEOUT
    )
    assert all(o.error is not None for o in outcomes), f"ranks without an error: {outcomes}"
    return [o.error.strip().splitlines()[-1] for o in outcomes]


def raise_os_error() -> None:
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("fail", "capacity"), [(raise_os_error, None), (die, 13), *slow((raise_os_error, 13), (die, None))]
)
@pytest.mark.parametrize("stage", EXCHANGE)
def test_all_ranks_stop_and_name_the_stage(stage: str, fail: Fail, capacity: int | None) -> None:
    errors = last_lines(stage, fail, capacity)
    own = errors.pop(FAILING)
    assert own == ("ended with exit code -9" if fail is die else "OSError: disk full")
    for rank, error in zip((0, 2), errors, strict=True):
        if stage == "count" and fail is raise_os_error:  # the gather itself tells
            assert error.startswith("ValueError: rank 1 failed in stage count, so all ranks stop"), error
            continue
        assert error.startswith(f"RuntimeError: stage {EXCHANGE[stage]}"), error
        assert f" failed on rank {rank}: " in error and " by peer" in error, error


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("capacity", [None, 13])
def test_an_interrupted_rank_tells_the_others(capacity: int | None) -> None:
    """Regression: they waited for the group's timeout where it was caught."""
    first, own, last = last_lines("count", interrupt, capacity)
    assert own == "KeyboardInterrupt" and first == last
    assert first.startswith("ValueError: rank 1 failed in stage count, so all ranks stop")


@pytest.mark.slow
def test_a_rank_that_swallows_its_error_fails_the_others_after_the_timeout() -> None:
    """It is still there, so no connection closes: the group's timeout is all that ends the wait."""

    def swallow() -> None:
        time.sleep(30)

    outcomes = rank_outcomes(run_steps, RANKS, "experts", swallow, None, group_timeout=1.0, timeout=4.0)
    assert outcomes[FAILING].error == "did not end in time and was killed"
    for rank in (0, 2):
        assert f"RuntimeError: stage combine failed on rank {rank}: " in (outcomes[rank].error or "")
