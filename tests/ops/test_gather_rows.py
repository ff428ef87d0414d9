"""gather_rows: rows of all ranks through boards in shared memory, between threads and between processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload import ops, reference
from support.processes import die, rank_outcomes, run_ranks

INT_MAX = 2**31 - 1


def make_boards(ranks: int, width: int, rounds: int = 0) -> list[Tensor]:
    """In memory that forked processes share, at one address in all; with so many rounds behind them."""
    boards = [torch.zeros(ops.board_words(ranks, width), dtype=torch.int32) for _ in range(ranks)]
    for board in boards:
        board.share_memory_()[0] = rounds
    return boards


def table(boards: list[Tensor]) -> Tensor:
    return torch.tensor([board.data_ptr() for board in boards])


def draw_row(rank: int, number: int, width: int) -> tuple[Tensor, list[int]]:
    """A row, and up to 4 of the width beside it: other values in every round, so that an old row is seen."""
    rng = np.random.default_rng([rank, number])
    row = torch.from_numpy(rng.integers(-(2**31), 2**31, width).astype(np.int32))
    beside = min(4, width - 1)
    return row[: width - beside], row[width - beside :].tolist()


def go_through(rank: int, boards: list[Tensor], rounds: int, width: int, delay: float) -> int:
    """Rounds of one rank, each compared; it waits at random before some. The number of rows that were wrong."""
    ranks, wrong = len(boards), 0
    addresses, rng = table(boards), np.random.default_rng(rank)
    for number in range(rounds):
        if delay and rng.random() < 0.1:
            time.sleep(rng.random() * delay)
        row, beside = draw_row(rank, number, width)
        got = ops.gather_rows(row, addresses, boards[rank], rank, beside=beside, timeout=50)
        wanted = reference.gather_rows(*zip(*(draw_row(r, number, width) for r in range(ranks)), strict=True))
        wrong += sum(int((a != b).any(1).sum()) for a, b in zip(got, wanted, strict=True))
    return wrong


@pytest.mark.parametrize(("ranks", "width"), [(1, 5), (2, 1), (3, 31), (4, 32), (5, 257)])
def test_threads_equal_reference(ranks: int, width: int) -> None:
    boards = make_boards(ranks, width)
    with ThreadPoolExecutor(ranks) as pool:
        done = pool.map(lambda rank: go_through(rank, boards, 100, width, 0), range(ranks))
        assert list(done) == [0] * ranks


@pytest.mark.parametrize(
    ("ranks", "rounds"), [(2, 200), (4, 600), pytest.param(4, 3000, marks=pytest.mark.slow)]
)
def test_processes_equal_reference(ranks: int, rounds: int) -> None:
    """Every rank is behind the others at times."""
    boards = make_boards(ranks, 33)
    assert run_ranks(go_through, ranks, boards, rounds, 33, 0.001) == [0] * ranks


@pytest.mark.parametrize("rounds", [2**31 - 3, -3])
def test_processes_go_on_where_the_number_of_the_round_wraps(rounds: int) -> None:
    boards = make_boards(2, 7, rounds)
    assert run_ranks(go_through, 2, boards, 8, 7, 0.0) == [0, 0]


def with_one_gone(rank: int, boards: list[Tensor], gone: int) -> tuple[str, float, str]:
    addresses = table(boards)
    row = torch.arange(9, dtype=torch.int32)
    ops.gather_rows(row, addresses, boards[rank], rank, timeout=30)
    if rank == gone:
        die()
    said, seconds = [], 0.0
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            ops.gather_rows(row, addresses, boards[rank], rank, timeout=0.5)
        seconds = time.monotonic() - start
        said.append(str(caught.value).split("\n")[0])
    return said[0], seconds, said[1]


def test_a_killed_rank_is_named_on_the_others() -> None:
    outcomes = rank_outcomes(with_one_gone, 3, make_boards(3, 9), 1)
    assert outcomes[1].error == "ended with exit code -9"
    for rank in (0, 2):
        first, seconds, second = outcomes[rank].value
        assert "gather_rows: rank 1 put no row within 500 ms; this group gathers no more" in first
        assert second == first and seconds < 0.3, "the board is closed: nobody waits again"


def test_what_a_late_rank_leaves() -> None:
    """As a kernel gives it: nothing old, and loads that planners refuse."""
    boards = make_boards(3, 4)
    boards[1][1] = 3  # rank 2 was late
    with pytest.raises(RuntimeError, match="rank 2 put no row"):
        ops.gather_rows(torch.ones(4, dtype=torch.int32), table(boards), boards[1], 1)
    loads = torch.zeros(3, 4, dtype=torch.int32)
    loads[2] = INT_MAX
    tables = ops.replica_tables(torch.arange(6, dtype=torch.int32) % 4, 3, 4)
    for planner in (ops.plan_exact, ops.plan_active, ops.plan_lp):
        with pytest.raises(ValueError, match=r"sum to .* copies"):
            planner(loads, tables)


def call(**changed: Any) -> tuple[Tensor, Tensor]:
    boards = make_boards(2, 4)
    given = {"row": torch.zeros(4, dtype=torch.int32), "boards": table(boards), "board": boards[0], "rank": 0}
    given |= changed
    return ops.gather_rows(
        *(given[n] for n in ("row", "boards", "board", "rank")),
        beside=given.get("beside", ()),
        timeout=given.get("timeout", 1),
    )


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "row dtype": (lambda: call(row=torch.zeros(4)), "row must be int32, got float32"),
    "row": (lambda: call(row=torch.zeros(1, 4, dtype=torch.int32)), r"row must be \[W\] .*, got \[1, 4\]"),
    "no row": (lambda: call(row=torch.zeros(0, dtype=torch.int32)), r"row must be \[W\] with W at least 1, got \[0\]"),
    "boards dtype": (lambda: call(boards=torch.zeros(2)), "boards must be int64, got float32"),
    "boards": (lambda: call(boards=torch.zeros(2, 1).long()), r"boards must be \[R\] with R in 1..1024, got \[2, 1\]"),
    "no address": (lambda: call(boards=torch.zeros(2).long()), "boards must hold an address for rank 0, got 0"),
    "rank": (lambda: call(rank=2), r"rank must be in 0\.\.1, got 2"),
    "timeout": (lambda: call(timeout=0.0001), "timeout_ms must be at least 1, got 0"),
    "board dtype": (lambda: call(board=torch.zeros(160)), "board must be int32, got float32"),
    "board": (lambda: call(board=torch.zeros(9, dtype=torch.int32)), r"board must have shape \[160\], got \[9\]"),
    "strides": (lambda: call(board=torch.zeros(320, dtype=torch.int32)[::2]), "board must be contiguous"),
    "beside": (lambda: call(beside=range(33)), "beside must have at most 32 integers, got 33"),
    "beside large": (lambda: call(beside=[2**31]), "beside must be 32-bit integers, got 2147483648"),
    "beside small": (lambda: call(beside=[-1, -(2**31) - 1]), "beside must be 32-bit integers, got -2147483649"),
    "board and beside": (lambda: call(beside=range(28)), r"board must have shape \[288\], got \[160\]"),
    "large": (
        lambda: call(row=torch.zeros(2**21, dtype=torch.int32), boards=torch.ones(1024).long()),
        r"row must have fewer than 2\^31 / R",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_opcheck() -> None:
    (board,) = make_boards(1, 4)
    given = (torch.arange(2, dtype=torch.int32), [7, -7], table([board]), board, 0, 1000)
    # a clone of the board, which the others would not write, is right for one rank alone
    torch.library.opcheck(torch.ops.isoload.gather_rows.default, given)


def test_traced() -> None:
    with FakeTensorMode():
        board = torch.empty(ops.board_words(3, 5), dtype=torch.int32)
        row, addresses = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
        rows, beside = ops.gather_rows(row, addresses, board, 1, beside=[0, 1])
        assert rows.shape == (3, 3) and beside.shape == (3, 2) and rows.dtype == beside.dtype == torch.int32
