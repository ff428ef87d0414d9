"""plan_joint: the bits of plan_exact, share_by_rank, plan_waterfill and share one after another, on fresh problems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.tables import ReplicaTables
from isoload.policies.plan import per_expert
from support.cases import MAX_COPIES, Case, draw, instances
from support.exact_splits import int32, random_ticks

FIXED = {"sweeps": 1, "budget": 3}
EVEN = {"sweeps": 0, "budget": 0}


def with_shared(
    case: Case, tokens: np.ndarray, num_shared: int, spare: int = 0
) -> tuple[Tensor, ReplicaTables, int]:
    """Loads [R, E + n], tables of the routed experts, and the shared ones' place, before `spare` slots."""
    loads = np.concatenate([case.loads, np.repeat(tokens[:, None], num_shared, 1)], 1).astype(np.int32)
    slots = case.slot_to_expert.reshape(case.num_ranks, -1)
    slots = np.pad(slots, ((0, 0), (0, num_shared + spare)), constant_values=-1).astype(np.int32)
    tables = ops.replica_tables(torch.from_numpy(slots.ravel()), case.num_ranks, case.num_experts)
    return torch.from_numpy(loads), tables, case.slots_per_rank


def draw_tokens(rng: np.random.Generator, case: Case, num_shared: int) -> np.ndarray:
    """About as many shared copies as routed ones, few, none, or those of a few ranks."""
    most = min(MAX_COPIES - case.total, 2 * case.total) // (num_shared * case.num_ranks)
    most = int(rng.choice([most, min(most, 3), 0]))
    given: np.ndarray = rng.integers(0, most + 1, case.num_ranks) * (
        rng.random(case.num_ranks) < rng.choice([1.0, 0.3])
    )
    return given


def one_by_one(
    loads: Tensor, tables: ReplicaTables, rank: int, num_shared: int, first_shared: int, **options: Any
) -> ops.JointSplit:
    """By the ops that it joins, and the torch ops between them."""
    ranks, ticks = tables.num_ranks, options.get("ticks")
    per_node = options.get("ranks_per_node") or ranks
    routed, tokens = loads[:, : tables.num_experts], loads[:, tables.num_experts].contiguous()
    split = ops.plan_exact(routed, tables, pour=tokens.sum(dtype=torch.int32) * num_shared, **options)
    copies = ops.share_by_rank(routed, split.quota, tables, per_node)
    poured = ops.plan_waterfill(copies, tokens, num_shared, per_node, ticks=ticks)
    quota = split.quota.clone()
    parts = per_expert(poured.share, num_shared).sum(-3, dtype=torch.int32)
    quota.view(ranks, -1).narrow(1, first_shared, num_shared).add_(parts)
    row = ops.share(routed, split.quota, tables, per_node, rank)
    bound = torch.minimum(split.bound, poured.peak)
    return ops.JointSplit(quota, poured.peak, bound, split.telemetry, row, poured.share)


def draw_options(rng: np.random.Generator, ranks: int) -> dict[str, Any]:
    nodes = [n for n in (1, 2, 4, 8, 31, ranks) if ranks % n == 0]
    drawn: dict[str, Any] = {"ranks_per_node": int(rng.choice(nodes))}
    drawn["objective"] = ("spread", "local")[rng.integers(2)]
    if rng.random() < 0.4:
        drawn["ticks"] = torch.from_numpy(random_ticks(rng, ranks))
    if rng.random() < 0.2:
        drawn["tolerance"] = 0.01
    return drawn | (({}, {}, FIXED, EVEN)[rng.integers(4)])


def assert_same(got: ops.JointSplit, expected: ops.JointSplit, named: object) -> None:
    for field, mine, theirs in zip(got._fields, got, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), (field, named)


@pytest.mark.parametrize("per_case", [0, 1])
def test_equals_the_ops_it_joins(per_case: int) -> None:
    rng = np.random.default_rng(per_case)
    for case in instances(3, seed=8400 + per_case, max_ranks=96):
        num_shared = int(rng.choice([1, 1, 2, 5]))
        if case.total + num_shared > MAX_COPIES:
            continue
        loads, tables, first = with_shared(
            case, draw_tokens(rng, case, num_shared), num_shared, int(rng.integers(3))
        )
        options, rank = draw_options(rng, case.num_ranks), int(rng.integers(case.num_ranks))
        expected = one_by_one(loads, tables, rank, num_shared, first, **options)
        got = ops.plan_joint(loads, tables, rank, num_shared, first, **options)
        assert_same(got, expected, (case.name, rank, num_shared, options))


def test_equals_reference() -> None:
    rng = np.random.default_rng(5)
    for case in instances(1, seed=8500, max_ranks=12):
        num_shared = int(rng.choice([1, 2, 3]))
        if case.total + num_shared > 2**24:
            continue
        loads, tables, first = with_shared(case, draw_tokens(rng, case, num_shared), num_shared)
        options, rank = draw_options(rng, case.num_ranks), int(rng.integers(case.num_ranks))
        expected = reference.plan_joint(loads, tables, rank, num_shared, first, **options)
        assert_same(ops.plan_joint(loads, tables, rank, num_shared, first, **options), expected, case.name)


def test_rows_and_shares_of_all_ranks_add_up_to_the_quota() -> None:
    rng = np.random.default_rng(6)
    for case in instances(1, seed=8600, max_ranks=16, families=("eplb", "duplicates", "empty_ranks")):
        loads, tables, first = with_shared(case, draw_tokens(rng, case, 1), 1)
        made = [ops.plan_joint(loads, tables, rank, 1, first) for rank in range(case.num_ranks)]
        whole = torch.stack([split.send_counts for split in made]).sum(0, dtype=torch.int32)
        whole.view(case.num_ranks, -1)[:, first] += made[0].share.sum(0, dtype=torch.int32)
        assert torch.equal(whole, made[0].quota), case.name


@pytest.mark.parametrize("ranks", [64, 65, 96])
def test_many_ranks(ranks: int) -> None:
    """Sets of ranks in one word and in more, which other kernels solve."""
    rng, case = np.random.default_rng(ranks), draw("eplb", ranks, 3)
    loads, tables, first = with_shared(case, draw_tokens(rng, case, 1), 1)
    for per_node in sorted({n for n in (1, 8, ranks) if ranks % n == 0}):
        expected = one_by_one(loads, tables, ranks - 2, 1, first, ranks_per_node=per_node)
        assert_same(
            ops.plan_joint(loads, tables, ranks - 2, 1, first, ranks_per_node=per_node), expected, per_node
        )


def test_more_than_shared_memory_holds() -> None:
    """Loads of 4,000 experts from 16 ranks: a GPU leaves them in global memory."""
    rng = np.random.default_rng(6)
    slots = np.concatenate([np.arange(4000), rng.integers(0, 4000, 80)]).astype(np.int32)
    case = Case("large", rng.permutation(slots), rng.integers(0, 40, (16, 4000)).astype(np.int32))
    loads, tables, first = with_shared(case, rng.integers(0, 9000, 16), 2)
    expected = one_by_one(loads, tables, 11, 2, first, ranks_per_node=8)
    assert_same(ops.plan_joint(loads, tables, 11, 2, first, ranks_per_node=8), expected, "large")


def test_layers_at_once_equal_one_by_one() -> None:
    cases = [draw("split_256", 16, seed) for seed in range(9)]
    rng = np.random.default_rng(7)
    made = [with_shared(case, draw_tokens(rng, case, 2), 2) for case in cases]
    loads, first = torch.stack([loads for loads, _, _ in made]), made[0][2]
    data = torch.stack([tables.data for _, tables, _ in made])
    tables = ReplicaTables(data, 16, 256, made[0][1].num_slots)
    together = ops.plan_joint(loads, tables, 5, 2, first, ranks_per_node=8)
    for i in range(9):
        alone = ops.plan_joint(loads[i], tables[i], 5, 2, first, ranks_per_node=8)
        assert_same(alone, ops.JointSplit(*(field[i] for field in together)), i)


def test_all_copies_of_the_largest_batch() -> None:
    """2^31 - 1 copies between a routed expert and three shared ones."""
    tokens = MAX_COPIES // 4
    tables = ops.replica_tables(int32(0, -1, -1, -1, 0, -1, -1, -1), 2, 1)
    loads = torch.tensor([[0, 0, 0, 0], [MAX_COPIES - 3 * tokens] + [tokens] * 3], dtype=torch.int32)
    got = ops.plan_joint(loads, tables, 1, 3, 1)
    assert int(got.quota.sum(dtype=torch.int64)) == MAX_COPIES
    assert int(got.peak) == int(got.bound) == 2**30


def test_refuses_more_copies_than_the_largest_batch_has() -> None:
    tables = ops.replica_tables(int32(0, -1, -1, -1, 0, -1, -1, -1), 2, 1)
    loads = torch.tensor([[0] * 4, [MAX_COPIES - 3 * 2**29 + 2] + [2**29] * 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"loads must sum to less than 2\^31 copies, got 2147483649"):
        ops.plan_joint(loads, tables, 1, 3, 1)


# The slots of support.exact_splits, and a shared slot behind each rank's two.
