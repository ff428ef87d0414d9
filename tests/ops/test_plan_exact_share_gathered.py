"""plan_exact_share_gathered: gather_rows and plan_exact_share at once, between threads and between processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload import ops, reference
from isoload.replica_tables import ReplicaTables
from support.processes import die, rank_outcomes, run_ranks

EXPERTS = 13
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nodes": {"ranks_per_node": 1, "tolerance": 0.1},
    "few": {"sweeps": 1, "budget": 2},
    "local": {"objective": "local"},
    "packed": {"objective": "packed"},
    "ticks": {"ticks": [1024, 700, 2000, 1]},
}


def make_boards(ranks: int, width: int) -> list[Tensor]:
    """In memory that forked processes share, at one address in all."""
    boards = [torch.zeros(ops.board_words(ranks, width), dtype=torch.int32) for _ in range(ranks)]
    return [board.share_memory_() for board in boards]


def table(boards: list[Tensor]) -> Tensor:
    return torch.tensor([board.data_ptr() for board in boards])


def make_tables(ranks: int) -> ReplicaTables:
    """Every expert, and more replicas of the first."""
    size = -(-EXPERTS // ranks) + 2
    slots = torch.arange(ranks * size, dtype=torch.int32) * 7 % EXPERTS
    return ops.replica_tables(slots, ranks, EXPERTS)


def options_of(name: str, ranks: int) -> dict[str, Any]:
    given = dict(OPTIONS[name])
    if "ticks" in given:
        given["ticks"] = torch.tensor(given["ticks"][:ranks], dtype=torch.int32)
    return given


def draw(rank: int, number: int) -> tuple[Tensor, list[int]]:
    rng = np.random.default_rng([rank, number])
    copies = rng.integers(0, 1000, EXPERTS) * (rng.random(EXPERTS) < 0.7)
    return torch.from_numpy(copies.astype(np.int32)), rng.integers(-(2**31), 2**31, 3).tolist()


def flat(result: Any) -> list[Tensor]:
    rows, told, split, share = result
    return [rows, told, *split, share]


def go_through(rank: int, boards: list[Tensor], rounds: int, delay: float, named: str) -> int:
    """Rounds of one rank, each compared; every fifth with the other op, as a rank does that cannot plan."""
    tables, addresses, wrong = make_tables(len(boards)), table(boards), 0
    options, rng = options_of(named, len(boards)), np.random.default_rng(rank)
    for number in range(rounds):
        if delay and rng.random() < 0.1:
            time.sleep(rng.random() * delay)
        row, beside = draw(rank, number)
        given = (row, addresses, boards[rank], rank)
        rows, told = zip(*(draw(r, number) for r in range(len(boards))), strict=True)
        if number % 5 == rank:
            got = list(ops.gather_rows(*given, beside=beside, timeout=50))
            wanted = list(reference.gather_rows(rows, told))
        else:
            got = flat(ops.plan_exact_share_gathered(*given, tables, beside=beside, timeout=50, **options))
            wanted = flat(reference.plan_exact_share_gathered(rows, told, tables, rank, **options))
        wrong += any(a.dtype != b.dtype or not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    return wrong


@pytest.mark.parametrize("named", OPTIONS)
def test_one_rank_equals_reference(named: str) -> None:
    assert go_through(0, make_boards(1, EXPERTS + 3), 12, 0, named) == 0


@pytest.mark.parametrize("named", OPTIONS)
def test_threads_equal_reference(named: str) -> None:
    boards = make_boards(3, EXPERTS + 3)
    with ThreadPoolExecutor(3) as pool:
        done = pool.map(lambda rank: go_through(rank, boards, 12, 0, named), range(3))
        assert list(done) == [0] * 3


def go_fast(rank: int, boards: list[Tensor], rounds: int) -> int:
    """As go_through, compared with the two ops."""
    tables, addresses, wrong = make_tables(len(boards)), table(boards), 0
    for number in range(rounds):
        row, beside = draw(rank, number)
        got = ops.plan_exact_share_gathered(
            row, addresses, boards[rank], rank, tables, beside=beside, timeout=50
        )
        loads = torch.stack([draw(r, number)[0] for r in range(len(boards))])
        told = torch.tensor([draw(r, number)[1] for r in range(len(boards))], dtype=torch.int32)
        wanted = (loads, told, *ops.plan_exact_share(loads, tables, rank))
        wrong += any(not torch.equal(a, b) for a, b in zip(flat(got), flat(wanted), strict=True))
    return wrong


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 10), (3, 100)])
def test_processes_equal_reference(ranks: int, rounds: int) -> None:
    """Every rank is behind the others at times."""
    boards = make_boards(ranks, EXPERTS + 3)
    assert run_ranks(go_through, ranks, boards, rounds, 0.002, "plain") == [0] * ranks


@pytest.mark.parametrize("rounds", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_rounds_equal_the_two_ops(rounds: int) -> None:
    assert run_ranks(go_fast, 4, make_boards(4, EXPERTS + 3), rounds) == [0] * 4


def with_one_gone(rank: int, boards: list[Tensor]) -> list[str]:
    given = (draw(rank, 0)[0], table(boards), boards[rank], rank, make_tables(3))
    ops.plan_exact_share_gathered(*given, timeout=30)
    if rank == 1:
        die()
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            ops.plan_exact_share_gathered(*given, timeout=0.5)
        said.append(str(caught.value).split("\n")[0])
    return said


def test_a_killed_rank_is_named_on_the_others() -> None:
    outcomes = rank_outcomes(with_one_gone, 3, make_boards(3, EXPERTS))
    told = "gather_rows: rank 1 put no row within 500 ms; this group gathers no more"
    for rank in (0, 2):
        assert all(told in line for line in outcomes[rank].value), outcomes[rank].error


def call(tables: ReplicaTables | None = None, row: Tensor | None = None, **options: Any) -> Any:
    (board,) = boards = make_boards(1, EXPERTS)
    row = draw(0, 0)[0] if row is None else row
    tables = make_tables(1) if tables is None else tables
    return ops.plan_exact_share_gathered(row, table(boards), board, 0, tables, **options)


def test_refuses() -> None:
    """What gather_rows and plan_exact refuse, and tables of several layers."""
    layers = torch.arange(EXPERTS, dtype=torch.int32).expand(2, -1)
    with pytest.raises(ValueError, match=r"tables must be those of one layer, got \[2, "):
        call(ops.replica_tables(layers.contiguous(), 1, EXPERTS))
    with pytest.raises(ValueError, match="row must be int32, got float32"):
        call(row=torch.zeros(EXPERTS))
    with pytest.raises(ValueError, match="beside must have at most 32 integers, got 33"):
        call(beside=range(33))
    with pytest.raises(ValueError, match="tables must be those of 12 experts"):
        call(row=draw(0, 0)[0][1:])
    with pytest.raises(ValueError, match="budget must be at least 0, got -1"):
        call(budget=-1)
    with pytest.raises(ValueError, match="loads must not be negative, got -5 for expert 0"):
        call(row=draw(0, 0)[0].index_fill(0, torch.tensor([0]), -5))
    with pytest.raises(ValueError, match=r"must sum to less than 2\^31 copies"):
        call(row=torch.full((EXPERTS,), 2**31 - 1, dtype=torch.int32))


def test_traced() -> None:
    real = make_tables(3)
    with FakeTensorMode():
        tables = ReplicaTables(torch.empty(real.data.shape, dtype=torch.int32), 3, EXPERTS, real.num_slots)
        board = torch.empty(ops.board_words(3, EXPERTS + 1), dtype=torch.int32)
        row, addresses = torch.empty(EXPERTS, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
        rows, told, split, share = ops.plan_exact_share_gathered(row, addresses, board, 1, tables, beside=[7])
        assert rows.shape == (3, EXPERTS) and told.shape == (3, 1)
        assert split.quota.shape == share.shape == (real.num_slots,) and split.peak.dtype == torch.int64
