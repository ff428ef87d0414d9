"""A fuzzed layer over processes, one of which may be killed or stopped: the others must raise and name the stage."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

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


def check_ranks(case: FuzzCase) -> None:
    """Two steps and a move on every rank; a victim gets its signal as it enters its n-th exchange."""
    rng = np.random.default_rng([case.seed, 2])
    how = str(rng.choice(["none", "kill", "kill", "stop"])) if case.num_ranks > 1 else "none"
    victim, entry = int(rng.integers(case.num_ranks)), int(rng.integers(1, 60))
    stopped = how == "stop"
    outcomes = rank_outcomes(
        on_rank, case.num_ranks, case, how, victim, entry,
        timeout=4 * GROUP_TIMEOUT if stopped else TIMEOUT, group_timeout=GROUP_TIMEOUT if stopped else TIMEOUT,
    )  # fmt: skip
    errors = [outcome.error for outcome in outcomes]
    if not gone(outcomes[victim]):  # there were fewer exchanges: an undisturbed run
        assert errors == [None] * case.num_ranks, "\n".join(f"rank {o.rank}: {o.error}" for o in outcomes)
        return
    for outcome in outcomes:
        last = str(outcome.error).strip().splitlines()[-1]
        told = f"rank {outcome.rank} after {how} of rank {victim} in its exchange {entry}: {last}"
        assert outcome.rank == victim or NAMED.match(last), told


def gone(outcome: Outcome) -> bool:
    return outcome.error in ("ended with exit code -9", "did not end in time and was killed")


def on_rank(rank: int, case: FuzzCase, how: str, victim: int, entry: int) -> None:
    if rank == victim and SIGNALS[how] is not None:
        count_down(entry, SIGNALS[how])
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
        inner: AbstractContextManager[None] = named(group, stage)
        with inner:
            yield

    CollectiveGroup.named = counted  # type: ignore[method-assign]
