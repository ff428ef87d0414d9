"""plan_active: one replica per expert, the fewest active slots on the busiest rank, by search and by max-flow."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.cases import FAMILIES, MAX_COPIES, Case, draw, instances
from support.oracles import flow_optimum


def solve(case: Case) -> ops.ActiveSplit:
    return ops.plan_active(torch.from_numpy(case.loads), case.tables())


def per_rank(case: Case, quota: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[R] active slots and copies of every rank."""
    rows = quota.numpy().astype(np.int64).reshape(case.num_ranks, -1)
    return (rows > 0).sum(1), rows.sum(1)


def check_split(case: Case, split: ops.ActiveSplit) -> None:
    """Every promise but optimality, from the placement alone."""
    quota, loads = split.quota.numpy().astype(np.int64), case.expert_loads()
    used = np.flatnonzero(quota)
    experts = case.slot_to_expert[used]
    assert sorted(experts.tolist()) == np.flatnonzero(loads).tolist(), f"{case.name}: one slot per expert"
    assert np.array_equal(quota[used], loads[experts]), f"{case.name}: all copies of it"
    most = per_rank(case, split.quota)[0].max()
    assert split.active_peak.item() == split.active_bound.item() == most, case.name


def choices(case: Case) -> list[list[int]]:
    """For every expert with load, the ranks that hold it."""
    return [sorted(ranks) for ranks, n in zip(case.rank_sets(), case.expert_loads(), strict=True) if n]


def fewest_by_search(case: Case) -> int:
    """Over all ways to choose a rank for every expert."""
    ways = product(*choices(case))
    return min(int(np.bincount(np.array(way, dtype=int), minlength=1).max()) for way in ways)


def test_small_cases_against_all_choices() -> None:
    searched = hard = 0
    for case in instances(6, seed=50, max_ranks=8):
        size = np.prod([float(len(ranks)) for ranks in choices(case)])
        if not 1 < size <= 3000:
            continue
        split = solve(case)
        check_split(case, split)
        assert split.active_peak.item() == fewest_by_search(case), case.name
        searched += 1
        hard += int(split.telemetry[1:3].sum() > 0)
    assert searched > 50 and hard > 5, (searched, hard)


@pytest.mark.parametrize("family", FAMILIES)
def test_peak_is_the_maximum_flow_s(family: str) -> None:
    for case in instances(1, seed=60, families=(family,)):
        split = solve(case)
        check_split(case, split)
        units = (case.expert_loads() > 0).astype(np.int32)
        best = flow_optimum(units, case.slot_to_expert, case.num_ranks)
        assert split.active_peak.item() == best, case.name


def test_equals_reference() -> None:
    moved = 0
    for case in [*instances(1, seed=70, max_ranks=16), *(draw("eplb", r, 71) for r in (65, 128, 200, 300))]:
        mine = solve(case)
        theirs = reference.plan_active(torch.from_numpy(case.loads), case.tables())
        for field, a, b in zip(mine._fields, mine, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (case.name, field, a, b)
        moved += int(mine.telemetry[3])
    assert moved > 50, "settling had no work: the test sees little"


def test_settling_never_raises_the_peak_in_copies() -> None:
    """Against the bare unit solution, of which plan_active promises no particular one."""
    lowered = 0
    for case in instances(1, seed=80, max_ranks=64, families=("eplb", "random", "split_256", "ring")):
        loads, tables = torch.from_numpy(case.expert_loads()).int(), case.tables()
        bare = ops.plan_exact((loads > 0).int(), tables, sweeps=8).quota
        bare = bare * torch.from_numpy(np.append(case.expert_loads(), 0)[case.slot_to_expert])
        before, after = (per_rank(case, quota)[1].max() for quota in (bare, solve(case).quota))
        assert after <= before, case.name
        lowered += after < before
    assert lowered > 1, "settling had no work: the test sees nothing"


def test_no_single_move_is_left_in_small_cases() -> None:
    """Where settling ended by itself, no expert could move to a rank with a slot to spare and help."""
    for case in instances(2, seed=90, max_ranks=12, families=("eplb", "random", "clique", "chain")):
        split, size = solve(case), case.slots_per_rank
        active, copies = per_rank(case, split.quota)
        for p in np.flatnonzero(split.quota.numpy()):
            n = int(split.quota[p])
            for rank in case.rank_sets()[case.slot_to_expert[p]] - {p // size}:
                spare = active[rank] < split.active_peak.item()
                assert not spare or copies[rank] + n >= copies[p // size]


def test_fewer_active_slots_than_the_exact_split() -> None:
    """What it is for: the exact split is better in copies, this one in active slots."""
    exact_slots = slots = exact_copies = copies = 0
    for seed in range(20):
        case = draw("eplb", 16, seed)
        split = ops.plan_exact(torch.from_numpy(case.loads), case.tables())
        mine, theirs = per_rank(case, solve(case).quota), per_rank(case, split.quota)
        assert mine[0].max() <= theirs[0].max() and mine[1].max() >= theirs[1].max()
        exact_slots, slots = exact_slots + theirs[0].max(), slots + mine[0].max()
        exact_copies, copies = exact_copies + theirs[1].max(), copies + mine[1].max()
    assert slots < exact_slots and copies > exact_copies


def test_layers_at_once_equal_one_by_one_and_sources_are_summed() -> None:
    cases = [draw("split_256", 8, seed) for seed in range(4)]
    tables = ops.replica_tables(torch.from_numpy(np.stack([c.slot_to_expert for c in cases])), 8, 256)
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    together = ops.plan_active(loads, tables)
    summed = ops.plan_active(loads.sum(1, dtype=torch.int32), tables)
    for i in range(4):
        alone = ops.plan_active(loads[i], tables[i])
        for field in range(4):
            assert torch.equal(together[field][i], alone[field])
            assert torch.equal(together[field][i], summed[field][i])


def test_the_largest_batch_does_not_overflow() -> None:
    slots = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    loads = torch.tensor([MAX_COPIES - 3, 3], dtype=torch.int32)
    split = ops.plan_active(loads, ops.replica_tables(slots, 2, 2))
    assert split.active_peak.item() == 1
    assert sorted(split.quota.tolist()) == [0, 0, 3, MAX_COPIES - 3]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


SLOTS = int32(0, 1, 1, 2, 2, 0, 3, 3)  # 4 experts on 4 ranks
LOADS = int32(5, 6, 7, 8)


@pytest.mark.parametrize(
    ("ranks", "slots", "message"),
    [
        (0, 8, r"num_ranks must be in 1..1024, got 0"),
        (1025, 8, r"num_ranks must be in 1..1024, got 1025"),
        (3, 8, "num_slots must be a multiple of num_ranks=3, got 8"),
    ],
)
def test_the_op_itself_refuses_groups(ranks: int, slots: int, message: str) -> None:
    tables = ops.replica_tables(SLOTS, 4, 4)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.isoload.plan_active.default(LOADS, tables.data, ranks, slots)
