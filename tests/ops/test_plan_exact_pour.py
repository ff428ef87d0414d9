"""plan_exact with `pour`: the joint optimum of a split and of copies that any rank may take after it."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
import torch

import reference
from isoload import ops
from support.cases import FAMILIES, MAX_COPIES, Case, draw, families_up_to, instances
from support.drifted import drifted
from support.exact_splits import LP_LIMIT, int32, random_fixed, random_ticks
from support.oracles import flow_optimum, lp_optimum
from support.sweeps import slow

MOST_RANKS = 65
PER_CASE = 3
FEW = 3000  # copies that are poured one by one


def with_room(case: Case) -> Case:
    """The same problem, with half the copies where it has as many as a batch may have."""
    return Case(case.name, case.slot_to_expert, case.loads // 2) if case.total == MAX_COPIES else case


def random_pour(rng: np.random.Generator, carried: int) -> int:
    """None, a few, one per top-8 token, as many as carried, far more, or all that a batch may have."""
    pour = int(rng.choice([0, 1, 7, carried // 8, carried // 8, carried, 10 * carried, MAX_COPIES]))
    return min(pour, MAX_COPIES - carried)


def draw_problem(rng: np.random.Generator, case: Case) -> tuple[Case, np.ndarray | None, int]:
    """A case, sometimes with fixed loads, and a pour; below 2^31 copies together."""
    case = with_room(case)
    fixed = random_fixed(rng, case) if rng.random() < 0.3 else None
    carried = case.total + (0 if fixed is None else int(fixed.sum(dtype=np.int64)))
    return case, fixed, random_pour(rng, carried)


def solve(case: Case, pour: int, **options: Any) -> ops.ExactSplit:
    arrays = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return ops.plan_exact(
        torch.from_numpy(case.loads), case.tables(), pour=torch.tensor(pour, dtype=torch.int32), **arrays
    )


def joint_optimum(case: Case, fixed: np.ndarray | None, ticks: np.ndarray | None, pour: int) -> int:
    """One program over all slots: every rank has one more, for a shared expert with `pour` copies."""
    held = case.slot_to_expert.reshape(case.num_ranks, -1)
    shared = np.full((case.num_ranks, 1), case.num_experts, dtype=held.dtype)
    slots, loads = np.concatenate([held, shared], axis=1).ravel(), np.append(case.expert_loads(), pour)
    if ticks is None and loads.sum() + (0 if fixed is None else fixed.sum(dtype=np.int64)) < LP_LIMIT:
        return lp_optimum(loads, slots, case.num_ranks, fixed)
    return flow_optimum(loads, slots, case.num_ranks, fixed, ticks)


def carried_by(case: Case, split: ops.ExactSplit, fixed: np.ndarray | None) -> list[int]:
    """[R] copies per rank before anything is poured."""
    routed = split.quota.numpy().reshape(case.num_ranks, -1).sum(1, dtype=np.int64)
    carried: list[int] = (routed if fixed is None else routed + fixed).tolist()
    return carried


def peak_when_poured(carried: list[int], ticks: list[int], pour: int) -> int:
    """The lowest water level, in cost, that has room for all copies; ranks above it take none."""
    peak = max(n * t for n, t in zip(carried, ticks, strict=True))
    low, high = 0, (sum(carried) + pour) * max(ticks)
    while low < high:
        level = (low + high) // 2
        if sum(max(0, level // t - n) for n, t in zip(carried, ticks, strict=True)) >= pour:
            high = level
        else:
            low = level + 1
    return max(peak, low)


def peak_one_by_one(carried: list[int], ticks: list[int], pour: int) -> int:
    """Every copy goes to the rank that it leaves cheapest."""
    queue = [((n + 1) * t, r) for r, (n, t) in enumerate(zip(carried, ticks, strict=True))]
    heapq.heapify(queue)
    peak = max(n * t for n, t in zip(carried, ticks, strict=True))
    for _ in range(pour):
        cost, r = queue[0]
        peak = max(peak, cost)
        heapq.heapreplace(queue, (cost + ticks[r], r))
    return peak


def check(
    case: Case, split: ops.ExactSplit, fixed: np.ndarray | None, ticks: np.ndarray | None, pour: int
) -> None:
    """The split's peak is what pouring onto its quota leads to."""
    carried = carried_by(case, split, fixed)
    assert sum(carried) == case.total + (0 if fixed is None else int(fixed.sum(dtype=np.int64))), case.name
    costs = [1] * case.num_ranks if ticks is None else ticks.tolist()
    peak = split.peak.item()
    assert peak == peak_when_poured(carried, costs, pour), (case.name, pour)
    if pour <= FEW:
        assert peak == peak_one_by_one(carried, costs, pour), (case.name, pour)
    assert split.bound.item() <= peak, case.name


def test_there_are_five_hundred_instances() -> None:
    assert PER_CASE * sum(r <= MOST_RANKS for family in FAMILIES.values() for r in family.ranks) >= 500


@pytest.mark.parametrize(("per_case", "every"), [(1, 4), *slow((PER_CASE, 1))])
@pytest.mark.parametrize("family", families_up_to(MOST_RANKS))
def test_peak_is_the_joint_optimum(family: str, per_case: int, every: int) -> None:
    rng = np.random.default_rng(list(FAMILIES).index(family))
    for i, case in enumerate(
        instances(per_case, seed=8000, max_ranks=MOST_RANKS, families=(family,), every=every)
    ):
        case, fixed, pour = draw_problem(rng, case)
        ticks = random_ticks(rng, case.num_ranks) if i % 3 == 2 and case.num_ranks <= 16 else None
        split = solve(case, pour, fixed=fixed, ticks=ticks)
        check(case, split, fixed, ticks, pour)
        best = joint_optimum(case, fixed, ticks, pour)
        assert split.peak.item() == split.bound.item() == best, (case.name, pour)


def test_pour_saves_work() -> None:
    """The split stops where pouring decides, after a sweep or two: sweeps, augmentations and Newton steps."""
    alone, joint = np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64)
    for seed in range(20):
        case = drifted(16, 32, tokens=2048, seed=seed)
        alone += solve(case, 0).telemetry.numpy()
        joint += solve(case, case.total // 8).telemetry.numpy()
    assert (2 * joint[:3] < alone[:3]).all(), (alone, joint)


def test_pour_of_nothing_changes_nothing() -> None:
    for case in instances(1, seed=8200, max_ranks=32):
        for mine, theirs in zip(
            solve(case, 0), ops.plan_exact(torch.from_numpy(case.loads), case.tables()), strict=True
        ):
            assert torch.equal(mine, theirs), case.name


@pytest.mark.parametrize("options", [{}, {"sweeps": 0}, {"tolerance": 0.02, "budget": 1, "sweeps": 1}])
def test_equals_reference(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(18)
    for i, case in enumerate(instances(1, seed=8300, max_ranks=16)):
        case, fixed, pour = draw_problem(rng, case)
        ticks = random_ticks(rng, case.num_ranks) if i % 2 else None
        split = solve(case, pour, fixed=fixed, ticks=ticks, **options)
        check(case, split, fixed, ticks, pour)
        expected = reference.plan_exact(
            torch.from_numpy(case.loads),
            case.tables(),
            None if fixed is None else torch.from_numpy(fixed),
            pour=torch.tensor(pour, dtype=torch.int32),
            ticks=None if ticks is None else torch.from_numpy(ticks),
            **options,
        )
        for field, mine, theirs in zip(split._fields, split, expected, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), (case.name, field, pour)


def test_by_hand() -> None:
    """Two ranks, expert 0 on both, expert 1 on rank 0: 4 + 8 copies; 5 poured make 17, so no rank has less than 9."""
    tables = ops.replica_tables(int32(0, 1, 0, -1), 2, 2)
    loads, pour = int32(4, 8), torch.tensor(5, dtype=torch.int32)
    split = ops.plan_exact(loads, tables, pour=pour)
    assert split.peak.item() == split.bound.item() == 9
    assert split.quota.view(2, 2).sum(1).tolist()[0] <= 9
    slow = ops.plan_exact(loads, tables, pour=pour, ticks=int32(1, 2))  # 17 copies: 12 at 1 and 6 at 2
    assert slow.peak.item() == slow.bound.item() == 12


def test_one_rank_and_no_copies() -> None:
    tables = ops.replica_tables(int32(0, 1), 1, 2)
    split = ops.plan_exact(int32(0, 0), tables, pour=torch.tensor(MAX_COPIES, dtype=torch.int32))
    assert split.peak.item() == split.bound.item() == MAX_COPIES
    assert split.quota.tolist() == [0, 0] and split.telemetry.tolist() == [0, 0, 0, 0]


def test_layers_at_once_equal_one_by_one() -> None:
    cases = [draw("split_256", 16, seed) for seed in range(20)]
    tables = ops.replica_tables(torch.from_numpy(np.stack([case.slot_to_expert for case in cases])), 16, 256)
    loads = torch.from_numpy(np.stack([case.expert_loads() for case in cases])).int()
    pour = torch.arange(0, 2000, 100, dtype=torch.int32)
    for plan_exact in (ops.plan_exact, reference.plan_exact):
        together = plan_exact(loads, tables, pour=pour)
        for i in (0, 7, 19):
            for field, alone in zip(together, plan_exact(loads[i], tables[i], pour=pour[i]), strict=True):
                assert torch.equal(field[i], alone)
