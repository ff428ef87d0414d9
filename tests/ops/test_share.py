"""share: every rank's part of a quota adds up exactly, keeps most copies near, and needs no other rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops import Order
from isoload.ops.tables import ReplicaTables
from support.cases import MAX_COPIES, Case, draw, instances

FAMILIES = (
    *("eplb", "random", "chain", "clique", "duplicates", "zero_loads", "one_expert", "no_replicas"),
    *("empty_slots", "empty_ranks", "spare_slots", "full_total"),
)
QUOTAS = ("exact", "even", "lowest", "random")


def make_quota(kind: str, case: Case, seed: int = 0) -> Tensor:
    """[P] int32 that conserves the case's loads: optimal, equal parts, all to one replica, or anyhow."""
    tables, loads = case.tables(), torch.from_numpy(case.loads)
    if kind in ("exact", "even"):
        return ops.plan_exact(loads, tables, **({} if kind == "exact" else {"budget": 0, "sweeps": 0})).quota
    rng = np.random.default_rng(seed)
    quota = np.zeros(len(case.slot_to_expert), dtype=np.int32)
    for e, copies in enumerate(case.expert_loads()):
        slots = slots_of(case, e)
        if kind == "lowest" and copies:
            quota[slots[0]] = copies
        elif copies:
            quota[slots] = rng.multinomial(copies, rng.dirichlet(np.full(len(slots), 0.5)))
    return torch.from_numpy(quota)


def slots_of(case: Case, expert: int) -> list[int]:
    """The expert's slots, the lowest on each rank."""
    lowest: dict[int, int] = {}
    for p in np.flatnonzero(case.slot_to_expert == expert):
        lowest.setdefault(p // case.slots_per_rank, int(p))
    return list(lowest.values())


def nodes_of(ranks: int) -> list[int]:
    """Some numbers of ranks per node."""
    return sorted({n for n in (1, 2, 3, 4, 8, 31, ranks) if ranks % n == 0})


def near(sent: np.ndarray, case: Case, size: int) -> int:
    """Copies that stay in their group of ``size`` ranks."""
    groups = case.num_ranks // size
    by_rank = sent.reshape(case.num_ranks, case.num_ranks, -1).sum(-1)
    return int(by_rank.reshape(groups, size, groups, size).sum((1, 3)).trace())


def most_near(quota: np.ndarray, case: Case, size: int) -> int:
    """sum over experts and groups of min(copies that start there, quota there): no share can keep more."""
    groups = case.num_ranks // size
    start = case.loads.reshape(groups, size, -1).sum(1, dtype=np.int64)
    end = np.zeros((groups, case.num_experts + 1), dtype=np.int64)
    where = np.arange(len(quota)) // (len(quota) // groups)
    np.add.at(end, (where, case.slot_to_expert), quota)
    return int(np.minimum(start, end[:, :-1]).sum())


def shared(seed: int, max_ranks: int = 16) -> Iterator[tuple[Case, str, Tensor]]:
    for case in instances(1, seed=seed, max_ranks=max_ranks, families=FAMILIES):
        for kind in QUOTAS:
            yield case, kind, make_quota(kind, case, seed)


def test_rows_add_up_to_the_quota_and_columns_to_the_loads() -> None:
    for case, kind, quota in shared(seed=100, max_ranks=48):
        for order in ("locality", "rank_major"):
            per_node = nodes_of(case.num_ranks)[-2:][0]
            sent = ops.share(torch.from_numpy(case.loads), quota, case.tables(), per_node, order=order)
            assert sent.shape == (case.num_ranks, len(quota)) and sent.dtype == torch.int32
            sent = sent.numpy().astype(np.int64)
            assert (sent >= 0).all(), (case.name, kind, order)
            assert np.array_equal(sent.sum(0), quota.numpy()), (case.name, kind, order)
            per_expert = np.zeros((case.num_experts + 1, case.num_ranks), dtype=np.int64)
            np.add.at(per_expert, case.slot_to_expert, sent.T)
            assert np.array_equal(per_expert[:-1].T, case.loads), (case.name, kind, order)


def test_local_and_node_local_copies_are_the_most_possible() -> None:
    strict = 0
    for case, kind, quota in shared(seed=200, max_ranks=48):
        loads, tables = torch.from_numpy(case.loads), case.tables()
        for per_node in nodes_of(case.num_ranks):
            sent = ops.share(loads, quota, tables, per_node).numpy().astype(np.int64)
            for size in (1, per_node):
                assert near(sent, case, size) == most_near(quota.numpy(), case, size), (
                    case.name,
                    kind,
                    per_node,
                )
            ranges = ops.share(loads, quota, tables, per_node, order="rank_major").numpy().astype(np.int64)
            strict += near(ranges, case, per_node) < near(sent, case, per_node)
    assert strict > 50, "rank_major keeps as much: the test sees nothing"


@pytest.mark.parametrize("order", ["locality", "rank_major"])
def test_equals_reference(order: Order) -> None:
    for case, kind, quota in shared(seed=300):
        loads, tables = torch.from_numpy(case.loads), case.tables()
        for per_node in nodes_of(case.num_ranks):
            mine = ops.share(loads, quota, tables, per_node, order=order)
            theirs = reference.share(loads, quota, tables, per_node, order=order)
            assert torch.equal(mine, theirs), (case.name, kind, per_node)


@pytest.mark.parametrize("order", ["locality", "rank_major"])
def test_one_rank_computes_its_row_alone(order: Order) -> None:
    for case, kind, quota in shared(seed=400, max_ranks=12):
        loads, tables = torch.from_numpy(case.loads), case.tables()
        per_node = nodes_of(case.num_ranks)[-2:][0]
        rows = ops.share(loads, quota, tables, per_node, order=order)
        for r in range(case.num_ranks):
            alone = ops.share(loads, quota, tables, per_node, rank=r, order=order)
            assert torch.equal(alone, rows[r]), (case.name, kind, r)
    assert torch.equal(reference.share(loads, quota, tables, per_node, rank=3, order=order), rows[3])


def test_rank_major_gives_contiguous_ranges_in_source_order() -> None:
    """An expert's copies in source order, cut into its replicas' quotas in slot order."""
    for case, kind, quota in shared(seed=500):
        if case.total > 100_000:
            continue
        ranges = ops.share(torch.from_numpy(case.loads), quota, case.tables(), 1, order="rank_major").numpy()
        expected = np.zeros_like(ranges)
        for e in range(case.num_experts):
            source = np.repeat(np.arange(case.num_ranks), case.loads[:, e])
            slots = slots_of(case, e)
            np.add.at(expected, (source, np.repeat(slots, quota.numpy()[slots]).astype(int)), 1)
        assert np.array_equal(ranges, expected), (case.name, kind)


@pytest.mark.parametrize("rank", [None, 0, 7])
def test_layers_at_once_equal_one_by_one(rank: int | None) -> None:
    cases = [draw("split_256", 8, seed) for seed in range(3)]
    quotas = torch.stack([make_quota(kind, case) for kind, case in zip(QUOTAS, cases, strict=False)])
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    tables = ops.replica_tables(torch.from_numpy(np.stack([c.slot_to_expert for c in cases])), 8, 256)
    together = ops.share(loads, quotas, tables, 4, rank=rank)
    assert torch.equal(together, reference.share(loads, quotas, tables, 4, rank=rank))
    for i in range(3):
        assert torch.equal(together[i], ops.share(loads[i], quotas[i], tables[i], 4, rank=rank))


def test_all_copies_of_the_largest_batch() -> None:
    """2^31 - 1 copies of one expert from one rank."""
    tables = ops.replica_tables(torch.tensor([0, 0, 0], dtype=torch.int32), 3, 1)
    loads = torch.tensor([[0], [MAX_COPIES], [0]], dtype=torch.int32)
    quota = torch.tensor([2**30, 2**30 - 2, 1], dtype=torch.int32)
    sent = ops.share(loads, quota, tables, 1)
    assert sent.tolist() == [[0, 0, 0], quota.tolist(), [0, 0, 0]]


@pytest.mark.parametrize("order", ["locality", "rank_major"])
def test_by_rank_sums_every_rank_s_own_row(order: Order) -> None:
    for case, kind, quota in shared(seed=300, max_ranks=32):
        loads, tables, ranks = torch.from_numpy(case.loads), case.tables(), case.num_ranks
        for per_node in nodes_of(ranks)[-2:]:
            rows = torch.stack([ops.share(loads, quota, tables, per_node, r, order) for r in range(ranks)])
            assert torch.equal(ops.share(loads, quota, tables, per_node, order=order), rows), (case, kind)
            summed = rows.view(ranks, ranks, -1).sum(-1, dtype=torch.int32)
            assert torch.equal(ops.share_by_rank(loads, quota, tables, per_node, order), summed)
            assert torch.equal(reference.share_by_rank(loads, quota, tables, per_node, order), summed)
    both = ops.share_by_rank(
        loads.expand(2, -1, -1),
        quota.expand(2, -1),
        ReplicaTables(tables.data.expand(2, -1), ranks, tables.num_experts, tables.num_slots),
        per_node,
        order,
    )
    assert torch.equal(both, summed.expand(2, -1, -1))
