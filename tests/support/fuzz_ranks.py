"""A fuzzed layer over processes, one of which may be killed or stopped: the others must raise and name the stage."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from isoload.transport import CollectiveGroup, CollectiveTransport
from support.fuzz_cases import FuzzCase
from support.fuzz_layers import Dense, follow
from support.processes import Outcome, rank_outcomes

GROUP_TIMEOUT = 3.0
TIMEOUT = 20.0  # of a case in which all end by themselves
SIGNALS = {"none": None, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# What a rank may say of a peer that is gone: the exchange it was in. Or of one that told it.
NAMED = re.compile(
    r"(RuntimeError: stage [\w ]+ failed on rank \d+: |ValueError: rank \d+ failed in stage \w+)"
)


class Loss(NamedTuple):
    """What happens to one rank as it enters its n-th exchange; it may have fewer."""

    how: str
    victim: int
    entry: int


def draw_loss(case: FuzzCase) -> Loss:
    rng = np.random.default_rng([case.seed, 2])
    how = str(rng.choice(["none", "kill", "kill", "stop"]))
    return Loss(how, int(rng.integers(case.num_ranks)), int(rng.integers(1, 60)))


def check_ranks(case: FuzzCase) -> None:
    """Two steps and a move on every rank; a victim gets its signal on the way."""
    loss = draw_loss(case)
    stopped = loss.how == "stop"
    limits = (4 * GROUP_TIMEOUT, GROUP_TIMEOUT) if stopped else (TIMEOUT, TIMEOUT)
    outcomes = rank_outcomes(on_rank, case.num_ranks, case, loss, timeout=limits[0], group_timeout=limits[1])
    if not gone(outcomes[loss.victim]):  # an undisturbed run
        errors = [outcome.error for outcome in outcomes]
        assert errors == [None] * case.num_ranks, "\n".join(f"rank {o.rank}: {o.error}" for o in outcomes)
        return
    for outcome in outcomes:
        last = str(outcome.error).strip().splitlines()[-1]
        assert outcome.rank == loss.victim or NAMED.match(last), f"rank {outcome.rank} after {loss}: {last}"


def gone(outcome: Outcome) -> bool:
    return outcome.error in ("ended with exit code -9", "did not end in time and was killed")


def on_rank(rank: int, case: FuzzCase, loss: Loss) -> None:
    if rank == loss.victim and (number := SIGNALS[loss.how]) is not None:
        count_down(loss.entry, number)
    follow(case, Dense(case), CollectiveTransport(case.topology))
    # Whoever is past its last exchange with the victim must meet it once more.
    CollectiveTransport(case.topology).group.gather_objects("end", None)


def count_down(entry: int, number: signal.Signals) -> None:
    """This process signals itself as it enters so many exchanges."""
    named, entered = CollectiveGroup.named, 0

    @contextmanager
    def counted(group: CollectiveGroup, stage: str) -> Iterator[None]:
        nonlocal entered
        entered += 1
        if entered == entry:
            os.kill(os.getpid(), number)
        with named(group, stage):
            yield

    CollectiveGroup.named = counted  # type: ignore[method-assign]
