"""plan_exact with a rank: its own bits, and those of share for this rank, on fresh problems of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.cases import MAX_COPIES, Case, draw, instances
from support.exact_splits import int32, random_fixed, random_ticks

FIXED = {"sweeps": 1, "budget": 3}


def nodes_of(ranks: int) -> list[int]:
    """Some numbers of ranks per node: one, all, and what lies between."""
    return sorted({n for n in (1, 2, 4, 8, 31, ranks) if ranks % n == 0})


def draw_options(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """What a policy may give besides: ticks, fixed copies and a pour within 2^31 copies, an objective."""
    ticks = torch.from_numpy(random_ticks(rng, case.num_ranks))
    fixed = random_fixed(rng, case)
    room = MAX_COPIES - case.total - int(fixed.sum(dtype=np.int64))
    pour = torch.tensor(int(rng.integers(0, min(room, case.total) + 1)), dtype=torch.int32)
    drawn: dict[str, Any] = {"ticks": ticks, "fixed": torch.from_numpy(fixed), "pour": pour}
    drawn = {name: value for name, value in drawn.items() if rng.random() < 0.5}
    drawn["objective"] = ("spread", "local")[rng.integers(2)]
    return drawn | (FIXED if rng.random() < 0.2 else {})


def assert_same(got: ops.ExactSplit, split: ops.ExactSplit, send_counts: Tensor, named: object) -> None:
    for mine, theirs in zip(got, split._replace(send_counts=send_counts), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), named


@pytest.mark.parametrize("per_case", [0, 1])
def test_equals_plan_exact_and_share(per_case: int) -> None:
    rng = np.random.default_rng(per_case)
    for case in instances(4, seed=8000 + per_case, max_ranks=96):
        loads, tables, options = torch.from_numpy(case.loads), case.tables(), draw_options(rng, case)
        options["ranks_per_node"] = int(rng.choice(nodes_of(case.num_ranks)))
        split = ops.plan_exact(loads, tables, **options)
        rank = int(rng.integers(case.num_ranks))
        row = ops.share(loads, split.quota, tables, options["ranks_per_node"], rank)
        got = ops.plan_exact(loads, tables, rank=rank, **options)
        assert not split.send_counts.numel()
        assert_same(got, split, row, (case.name, rank, options))


def test_the_rows_of_all_ranks_add_up_to_the_quota() -> None:
    for case in instances(1, seed=8100, max_ranks=16, families=("eplb", "duplicates", "empty_ranks")):
        loads, tables = torch.from_numpy(case.loads), case.tables()
        made = [ops.plan_exact(loads, tables, rank=rank) for rank in range(case.num_ranks)]
        assert torch.equal(sum(split.send_counts for split in made), made[0].quota), case.name


def test_equals_reference() -> None:
    rng = np.random.default_rng(5)
    for case in instances(1, seed=8200, max_ranks=16):
        loads, tables = torch.from_numpy(case.loads), case.tables()
        options = draw_options(rng, case) | {"ranks_per_node": nodes_of(case.num_ranks)[-2:][0]}
        rank = int(rng.integers(case.num_ranks))
        expected = reference.plan_exact(loads, tables, rank=rank, **options)
        assert_same(
            ops.plan_exact(loads, tables, rank=rank, **options),
            expected,
            expected.send_counts,
            (case.name, options),
        )


@pytest.mark.parametrize("ranks", [64, 65, 96])
def test_many_ranks(ranks: int) -> None:
    """Sets of ranks in one word and in more, which other kernels solve."""
    case = draw("eplb", ranks, 3)
    loads, tables = torch.from_numpy(case.loads), case.tables()
    for per_node in nodes_of(ranks):
        split = ops.plan_exact(loads, tables)
        row = ops.share(loads, split.quota, tables, per_node, ranks - 2)
        got = ops.plan_exact(loads, tables, rank=ranks - 2, ranks_per_node=per_node)
        assert_same(got, split, row, per_node)


def test_more_than_shared_memory_holds() -> None:
    """Loads of 4,000 experts from 16 ranks: a GPU leaves them in global memory."""
    rng = np.random.default_rng(6)
    slots = np.concatenate([np.arange(4000), rng.integers(0, 4000, 80)]).astype(np.int32)
    loads = torch.from_numpy(rng.integers(0, 40, (16, 4000)).astype(np.int32))
    tables = ops.replica_tables(torch.from_numpy(rng.permutation(slots)), 16, 4000)
    split = ops.plan_exact(loads, tables)
    row = ops.share(loads, split.quota, tables, 8, 11)
    assert_same(ops.plan_exact(loads, tables, rank=11, ranks_per_node=8), split, row, "large")


def test_layers_at_once_equal_one_by_one() -> None:
    cases = [draw("split_256", 16, seed) for seed in range(9)]
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    tables = ops.replica_tables(torch.from_numpy(np.stack([c.slot_to_expert for c in cases])), 16, 256)
    fixed = torch.arange(9 * 16, dtype=torch.int32).view(9, 16)
    together = ops.plan_exact(loads, tables, fixed, rank=5, ranks_per_node=8)
    for i in range(9):
        alone = ops.plan_exact(loads[i], tables[i], fixed[i], rank=5, ranks_per_node=8)
        of_layer = ops.ExactSplit(*(field[i] for field in together))
        assert_same(alone, of_layer, together.send_counts[i], i)


def test_all_copies_of_the_largest_batch() -> None:
    """2^31 - 1 copies of one expert from one rank, of three that hold it."""
    tables = ops.replica_tables(int32(0, 0, 0), 3, 1)
    loads = torch.tensor([[0], [MAX_COPIES], [0]], dtype=torch.int32)
    for rank in range(3):
        split = ops.plan_exact(loads, tables, rank=rank)
        assert torch.equal(split.send_counts, split.quota if rank == 1 else torch.zeros_like(split.quota))
        assert int(split.quota.sum(dtype=torch.int64)) == MAX_COPIES
