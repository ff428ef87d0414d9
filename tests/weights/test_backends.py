"""Every backend brings the same weights and returns the same gradients, whatever the stacks; plain loops say which."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from isoload.transport import CollectiveGroup, Group, LocalGroup
from isoload.transport.exchanges import Peers
from isoload.weights import backends
from isoload.weights.backends import BorrowPlan, Pull, make_backend
from isoload.weights.borrowing import Borrowing
from isoload.weights.layout import Address
from support.processes import run_ranks
from support.shared_memory import CPU, shared_memory

RESIDENT = 3
WEIGHTS = [
    ((4, 6), torch.float8_e4m3fn),
    ((3,), torch.uint8),
    ((2, 5), torch.bfloat16),
    ((1,), torch.float64),
]


def draw_plan(seed: int, ranks: int, spare: int) -> BorrowPlan:
    """Every rank is home to three experts, in shuffled rows; each spare slot holds one of any rank, or none."""
    rng = np.random.default_rng(seed)
    home = [Address(r, int(row)) for r in range(ranks) for row in rng.permutation(RESIDENT)]
    slots = np.full((ranks, RESIDENT + spare), -1, np.int32)
    for rank in range(ranks):
        chosen = rng.permutation(len(home))[:spare]
        chosen = np.where(rng.random(len(chosen)) < 0.7, chosen, -1)
        slots[rank, RESIDENT : RESIDENT + len(chosen)] = chosen
    table = torch.tensor(home, dtype=torch.int32)
    return BorrowPlan(torch.from_numpy(slots).flatten(), table, dict(enumerate(home)), ranks, spare)


def draw_stack(seed: int, rank: int, w: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + 10 * rank + w)
    wide = torch.randn(rows, *shape, generator=draw, dtype=torch.float64) * 100
    return wide.to(torch.int32).to(dtype) if dtype == torch.uint8 else wide.to(dtype)


def bring(group: Group, name: str, seed: int, ranks: int, spare: int) -> list[list[Tensor]]:
    """The owned ranks' pools as bytes, where untouched places keep their poison."""
    plan, backend = draw_plan(seed, ranks, spare), make_backend(group, name, torch.device("cpu"))
    held = [[draw_stack(seed, r, w, RESIDENT, *kind) for w, kind in enumerate(WEIGHTS)] for r in group.ranks]
    pools = [[torch.full((spare, *shape), 7.0).to(dtype) for shape, dtype in WEIGHTS] for _ in group.ranks]
    backend.start("borrow", plan, held, pools)()
    return [[pool.view(torch.uint8) for pool in own] for own in pools]


def total_dtype(seed: int, dtype: torch.dtype) -> torch.dtype:
    """Of the totals: the pools' or the wider one, in turn."""
    return dtype if seed % 2 else torch.promote_types(dtype, torch.float32)


def give(
    group: Group, name: str, seed: int, ranks: int, spare: int, dtype: torch.dtype
) -> list[list[Tensor]]:
    """The owned ranks' totals after the gradients have come home; values whose sum depends on its order."""
    plan, backend = draw_plan(seed, ranks, spare), make_backend(group, name, torch.device("cpu"))
    exact = total_dtype(seed, dtype)
    shapes = [(4, 6), (3,)]
    grads = [[draw_stack(seed, r, w, spare, s, dtype) for w, s in enumerate(shapes)] for r in group.ranks]
    totals = [
        [draw_stack(seed, r, w + 5, RESIDENT, s, exact) for w, s in enumerate(shapes)] for r in group.ranks
    ]
    backend.add_back("borrowed gradients", plan, grads, totals)
    return totals


def brought(seed: int, ranks: int, spare: int) -> list[list[Tensor]]:
    plan = draw_plan(seed, ranks, spare)
    pools = [[torch.full((spare, *shape), 7.0).to(dtype) for shape, dtype in WEIGHTS] for _ in range(ranks)]
    for source, target in plan.moves:
        for w, (shape, dtype) in enumerate(WEIGHTS):
            row = draw_stack(seed, source.rank, w, RESIDENT, shape, dtype)[source.row]
            pools[target.rank][w][target.row] = row
    return [[pool.view(torch.uint8) for pool in own] for own in pools]


def given(seed: int, ranks: int, spare: int, dtype: torch.dtype) -> list[list[Tensor]]:
    plan, exact, shapes = draw_plan(seed, ranks, spare), total_dtype(seed, dtype), [(4, 6), (3,)]
    totals = [
        [draw_stack(seed, r, w + 5, RESIDENT, s, exact) for w, s in enumerate(shapes)] for r in range(ranks)
    ]
    wide = torch.promote_types(exact, torch.float32)
    sums = [[total.to(wide) for total in own] for own in totals]
    for source, target in sorted(plan.moves, key=lambda move: move.target):
        for w, shape in enumerate(shapes):
            grad = draw_stack(seed, target.rank, w, spare, shape, dtype)[target.row]
            sums[source.rank][w][source.row] += grad.to(wide)
    return [[total.to(exact) for total in own] for own in sums]


def assert_equal(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("name", ["pull", "copy", "all_to_all"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_virtual_ranks(name: str, ranks: int) -> None:
    group = LocalGroup(isoload.Topology(ranks))
    for seed in range(5):
        for spare in (1, 4):
            assert_equal(bring(group, name, seed, ranks, spare), brought(seed, ranks, spare))
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                got = give(group, name, seed, ranks, spare, dtype)
                assert_equal(got, given(seed, ranks, spare, dtype))


def on_rank(rank: int, ranks: int, name: str) -> list[Any]:
    group = CollectiveGroup(isoload.Topology(ranks))
    found: list[Any] = []
    for seed in range(3):
        found.append(bring(group, name, seed, ranks, 4))
        found += [give(group, name, seed, ranks, 4, dtype) for dtype in (torch.bfloat16, torch.float32)]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(on_rank, ranks, ranks, "all_to_all")):
        wanted: list[Any] = []
        for seed in range(3):
            wanted.append(brought(seed, ranks, 4))
            wanted += [given(seed, ranks, 4, dtype) for dtype in (torch.bfloat16, torch.float32)]
        for got, want in zip(found, wanted, strict=True):
            assert_equal(got, [want[rank]])


def pulled(rank: int, ranks: int) -> list[Any]:
    with shared_memory():
        group = CollectiveGroup(isoload.Topology(ranks))
        backend = make_backend(group, None, CPU)
        assert (backend.name, backend.why) == ("pull", "the ranks read each other's memory")
        plan = draw_plan(0, ranks, 4)
        rows = [draw_stack(0, rank, w, RESIDENT, *kind) for w, kind in enumerate(WEIGHTS)]
        held = [backend.new_stack(stack, RESIDENT).copy_(stack) for stack in rows]
        pools = [torch.full((4, *shape), 7.0).to(dtype) for shape, dtype in WEIGHTS]
        dist.barrier()  # as the gather of a batch's loads is one
        backend.start("borrow", plan, [held], [pools])()
        found = [[[pool.view(torch.uint8) for pool in pools]]]
        return found + [give(group, "pull", 0, ranks, 4, dtype) for dtype in (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_read_each_other(ranks: int) -> None:
    wanted = [brought(0, ranks, 4)]
    wanted += [given(0, ranks, 4, dtype) for dtype in (torch.bfloat16, torch.float32)]
    for rank, found in enumerate(run_ranks(pulled, ranks, ranks)):
        for got, want in zip(found, wanted, strict=True):
            assert_equal(got, [want[rank]])


def chosen(rank: int) -> tuple[str, str, list[Any]]:
    with shared_memory(host=f"node{rank}"), patch.object(backends, "log") as log:
        group = CollectiveGroup(isoload.Topology(2))
        with pytest.raises(ValueError, match=r"where ranks cannot read .* got 'copy': .* on different hosts"):
            make_backend(group, "copy", CPU)
        backend = make_backend(group, None, torch.device("cuda"))
        return backend.name, backend.why, list(log.log.call_args.args)


def test_the_choice_and_its_reason_are_logged() -> None:
    for name, why, (level, text, *values) in run_ranks(chosen, 2):
        assert name == "all_to_all" and why.startswith(
            "pull cannot be used: ranks 0 and 1 run on different hosts"
        )
        assert level == logging.WARNING and text % tuple(values) == f"borrow uses all_to_all: {why}"


def test_a_wait_for_pulled_weights_is_not_for_those_pulled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next layer's copies may be on the side stream by then: on stubs that note what is enqueued where."""
    enqueued: list[str] = []
    waited: list[list[str]] = []

    class Event:
        def record(self, _stream: object) -> None:
            self.after = list(enqueued)

    class Stream:
        def __init__(self, _device: object = None) -> None: ...

        def wait_stream(self, _other: object) -> None:
            waited.append(list(enqueued))

        def wait_event(self, event: Event) -> None:
            waited.append(event.after)

    for name, stub in (("Event", Event), ("Stream", Stream), ("current_stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    pull = Pull(LocalGroup(isoload.Topology(2)), Peers())
    pools = [[SimpleNamespace(device=torch.device("cuda"))]]
    first, second = (pull._on_side_stream(lambda i=i: enqueued.append(f"layer {i}"), pools) for i in (1, 2))
    waited.clear()  # the side stream has waited, too
    first()
    second()
    assert waited == [["layer 1"], ["layer 1", "layer 2"]]


def test_weights_that_peers_cannot_read_are_refused_by_name() -> None:
    """`pull` over processes reads the layer's own memory; a stand-in, since only a GPU has such a group."""
    borrowing = object.__new__(Borrowing)
    borrowing.group = SimpleNamespace(ranks=(0,), topology=isoload.Topology(2))
    borrowing.backend = SimpleNamespace(reads_peers=True, name="pull")
    borrowing.check(SimpleNamespace(shows_storage=lambda: True))
    message = r"borrow must be all_to_all or deep_ep where expert Parameters have memory .* got 'pull'"
    with pytest.raises(ValueError, match=message):
        borrowing.check(SimpleNamespace(shows_storage=lambda: False))
