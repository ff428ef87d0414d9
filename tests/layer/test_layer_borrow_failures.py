"""What goes wrong with borrowing goes wrong on all ranks: at construction before any wait, later by the stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoload
from isoload.transport import CollectiveTransport
from isoload.weights.borrowing import SparePool
from support.borrowed_layer import LLEP, Setup, make_setup
from support.processes import die, rank_outcomes

RANKS, FAILING = 3, 1
STOPPED = "ValueError: rank 1 failed in stage construction, so all ranks stop; see the error of that rank"
# Where rank 1 fails -> the exchange in which the others wait for it first
EXCHANGE = {
    "borrow": "borrow",
    "borrow backward": "borrow backward",
    "borrowed gradients": "borrowed gradients",
}


def last_lines(body: Callable[..., None], *args: Any) -> list[str]:
    outcomes = rank_outcomes(body, RANKS, *args, timeout=20, group_timeout=5)
    assert all(o.error is not None for o in outcomes), outcomes
    return [str(o.error).strip().splitlines()[-1] for o in outcomes]


def raise_os_error() -> None:
    raise OSError("disk full")


def fail_at(rank: int, stage: str, fail: Callable[[], None], backend: str) -> None:
    setup = make_setup(RANKS)
    transport = CollectiveTransport(setup.placement.topology)
    layer = setup.layer(transport, **LLEP, borrow=backend)
    assert layer.borrowing is not None

    def reaching(call: Callable[..., Any]) -> Callable[..., Any]:
        def both(first: str, *args: Any) -> Any:
            if armed and rank == FAILING and first == stage:
                fail()
            return call(first, *args)

        return both

    armed = False
    back = layer.borrowing.backend
    back.start, back.add_back = reaching(back.start), reaching(back.add_back)  # type: ignore[method-assign]
    for armed in (False, True):  # noqa: B007 (reaching reads it)
        loss = layer(setup.rows[rank]).square().sum()
        layer.borrowing.pool.holds[:] = [None, None]  # so that backward brings the weights again
        loss.backward()


@pytest.mark.parametrize("fail", [raise_os_error, die])
@pytest.mark.parametrize("stage", EXCHANGE)
def test_all_ranks_stop_and_name_the_stage(stage: str, fail: Callable[[], None]) -> None:
    errors = last_lines(fail_at, stage, fail, "all_to_all")
    own = errors.pop(FAILING)
    assert own == ("ended with exit code -9" if fail is die else "OSError: disk full")
    for rank, error in zip((0, 2), errors, strict=True):
        assert error.startswith(f"RuntimeError: stage {EXCHANGE[stage]} failed on rank {rank}: "), error


def construct(rank: int, what: str) -> None:
    """Every rank makes the layer, rank 1 another one."""
    setup = make_setup(RANKS)
    how: dict[str, Any] = dict(LLEP)
    if what == "pull without shared memory":
        how["borrow"] = "pull"
    elif rank == FAILING:
        if what == "dtype":
            setup = make_setup(RANKS, dtype=torch.float32)
        elif what == "shape":
            setup = make_setup(RANKS, bias=True)
        elif what == "placement":
            setup = make_setup(RANKS, slots=8)
        elif what == "no spare slots":
            setup = make_setup(RANKS, slots=8, spare=0)
        elif what == "memory":
            SparePool.__init__ = no_memory  # type: ignore[method-assign]
        else:
            key, value = what.split("=")
            how[key] = int(value) if value.isdigit() else value
    setup.layer(CollectiveTransport(isoload.Topology(RANKS)), **how)


def no_memory(pool: SparePool, like: Any, spare_slots: int, backend: Any) -> None:
    """SparePool.__init__ where no tensor can be made."""

    class Full:
        shape, itemsize = like[0][0].shape, 8

        def new_zeros(self, *sizes: int) -> None:
            raise torch.OutOfMemoryError("no more memory")

    MADE(pool, [[Full()]], spare_slots, backend)


MADE = SparePool.__init__


@pytest.mark.parametrize(
    ("what", "own"),
    [
        ("min_chunk=0", "min_chunk must be in 1..2^31-1, got 0"),
        ("capacity=0", "capacity must be in 1..1000, got 0"),
        ("no spare slots", "spare_slots must be at least 1 for policy llep, got 0"),
        ("memory", "spare_slots must fit in memory, 2 times 2 experts of 1024 bytes, got no more memory"),
    ],
)
def test_a_rank_that_cannot_be_made_stops_all(what: str, own: str) -> None:
    errors = last_lines(construct, what)
    assert errors.pop(FAILING) == f"ValueError: {own}"
    assert all(error.startswith(STOPPED) for error in errors)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("min_chunk=7", "policy must be the same on all ranks"),
        (
            "dtype",
            "experts must be the same on all ranks, got gate_up [16, 16, 8], down [16, 8, 8] torch.float64 on cpu",
        ),
        ("shape", "experts must be the same on all ranks"),
        ("placement", "checksum of slot_to_expert must be the same on all ranks"),
        (
            "borrow=all_to_all",
            "borrow must be the same on all ranks, got None on rank 0 and all_to_all on rank 1",
        ),
        ("weight_rows=20", "weight_rows must be the same on all ranks, got None on rank 0 and 20 on rank 1"),
    ],
)
def test_ranks_that_differ_all_say_so(what: str, named: str) -> None:
    for error in last_lines(construct, what):
        assert error.startswith(f"ValueError: {named}"), error


def test_processes_on_cpu_cannot_pull() -> None:
    rule = "borrow must be all_to_all or deep_ep where ranks cannot read each other's memory"
    said = f"ValueError: {rule}, got 'pull': processes cannot read each other's memory on cpu"
    assert last_lines(construct, "pull without shared memory") == [said] * RANKS


def test_backends_that_cannot_be() -> None:
    setup: Setup = make_setup(2)
    with pytest.raises(ValueError, match="borrow='p2p' was removed: use all_to_all, or pull where"):
        setup.layer(**LLEP, borrow="p2p")
    with pytest.raises(ValueError, match="borrow must be one of pull, copy, all_to_all, deep_ep, got 'post'"):
        setup.layer(**LLEP, borrow="post")
