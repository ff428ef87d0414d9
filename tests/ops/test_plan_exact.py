"""plan_exact: optimal in integers against two independent oracles, certified, bit-equal to its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import reference
from isoload import ops
from support.cases import FAMILIES, MAX_COPIES, Case, draw, instances
from support.exact_splits import (
    LOADS,
    SLOTS,
    check_split,
    optimum,
    random_fixed,
    random_ticks,
    solve,
)
from support.oracles import flow_optimum
from support.sweeps import slow

PER_CASE = 8


def test_there_are_two_thousand_instances() -> None:
    assert PER_CASE * sum(len(family.ranks) for family in FAMILIES.values()) >= 2000


@pytest.mark.parametrize(("per_case", "every"), [(1, 4), *slow((PER_CASE, 1))])
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_is_the_integral_optimum(family: str, per_case: int, every: int) -> None:
    for case in instances(per_case, seed=1000, families=(family,), every=every):
        split = solve(case)
        check_split(case, split)
        assert split.peak.item() == split.bound.item() == optimum(case), case.name
        paths_only = solve(case, sweeps=0)
        check_split(case, paths_only)
        assert paths_only.peak.item() == paths_only.bound.item() == split.peak.item(), case.name


def test_every_stage_of_the_solver_is_needed() -> None:
    """Otherwise the test above would not see a fault in that stage."""
    used = np.zeros(4, dtype=np.int64)
    for case in instances(1, seed=1000, families=("eplb", "chain", "ring", "clique")):
        used += solve(case).telemetry.numpy() > 0
    sweeps, paths, steps, cut = used
    assert min(sweeps, paths, steps) > 2 and cut == 0


@pytest.mark.parametrize("options", [{}, {"sweeps": 0}, {"tolerance": 0.01, "sweeps": 1}, {"budget": 2}])
def test_equals_reference(options: dict[str, Any]) -> None:
    for case in instances(1, seed=2000, max_ranks=16):
        assert_equal_split(case, **options)


@pytest.mark.parametrize("options", [{}, {"sweeps": 0, "tolerance": 0.1}, {"sweeps": 0, "budget": 3}])
def test_equals_reference_with_fixed_loads_and_ticks(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(17)
    for case in instances(1, seed=2100, max_ranks=16):
        fixed, ticks = torch.from_numpy(random_fixed(rng, case)), random_ticks(rng, case.num_ranks)
        assert_equal_split(case, fixed=fixed, **options)
        assert_equal_split(case, fixed=fixed, ticks=torch.from_numpy(ticks), **options)


@pytest.mark.parametrize("ranks", [65, 128, 200, 300])
def test_equals_reference_in_wide_groups(ranks: int) -> None:
    """Rank sets of 2, 4 and 16 words."""
    for family in ("eplb", "chain", "random"):
        assert_equal_split(draw(family, ranks, 5))
        assert_equal_split(draw(family, ranks, 6), sweeps=0, budget=20)


def assert_equal_split(case: Case, **options: Any) -> None:
    split = solve(case, **options)
    expected = reference.plan_exact(torch.from_numpy(case.loads), case.tables(), **options)
    for field, mine, theirs in zip(split._fields, split, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), (case.name, field, mine, theirs)


def test_fixed_loads() -> None:
    rng = np.random.default_rng(3)
    for case in instances(1, seed=3000, max_ranks=72):
        fixed = random_fixed(rng, case)
        split = solve(case, fixed=torch.from_numpy(fixed))
        check_split(case, split, fixed)
        assert split.peak.item() == split.bound.item() == optimum(case, fixed), case.name


def test_ticks() -> None:
    rng = np.random.default_rng(4)
    for i, case in enumerate(instances(1, seed=4000, max_ranks=32)):
        ticks = random_ticks(rng, case.num_ranks)
        fixed = random_fixed(rng, case) if i % 2 else None
        split = solve(
            case, ticks=torch.from_numpy(ticks), fixed=None if fixed is None else torch.from_numpy(fixed)
        )
        check_split(case, split, fixed, ticks)
        best = flow_optimum(case.expert_loads(), case.slot_to_expert, case.num_ranks, fixed, ticks)
        assert split.peak.item() == split.bound.item() == best, case.name


def test_equal_ticks_scale_the_peak() -> None:
    for case in instances(1, seed=4100, max_ranks=16):
        ticks = torch.full((case.num_ranks,), 1024, dtype=torch.int32)
        assert solve(case, ticks=ticks).peak.item() == 1024 * solve(case).peak.item(), case.name


@pytest.mark.parametrize("tolerance", [0.001, 0.05, 0.5, 1000])
def test_tolerance(tolerance: float) -> None:
    rng = np.random.default_rng(5)
    for case in instances(1, seed=5000, max_ranks=32):
        exact, near = solve(case), solve(case, tolerance=tolerance)
        check_split(case, near)
        bound, peak = near.bound.item(), near.peak.item()
        assert bound <= exact.peak.item() <= peak <= bound * (1 + tolerance), case.name
        ticks = torch.from_numpy(random_ticks(rng, case.num_ranks))
        near = solve(case, ticks=ticks, tolerance=tolerance)
        best = solve(case, ticks=ticks).peak.item()
        assert near.bound.item() <= best <= near.peak.item() <= near.bound.item() * (1 + tolerance), case.name


@pytest.mark.parametrize("sweeps", [0, 1, 4])
def test_more_budget_never_raises_the_peak(sweeps: int) -> None:
    cut = 0
    for case in instances(1, seed=6000, max_ranks=32):
        best = solve(case).peak.item()
        peak = solve(case, budget=0, sweeps=0).peak.item()
        last = False
        for budget in range(40):
            split = solve(case, budget=budget, sweeps=sweeps)
            check_split(case, split)
            assert split.bound.item() <= best <= split.peak.item() <= peak, (case.name, budget)
            assert split.telemetry[1].item() <= budget
            peak, last = split.peak.item(), split.telemetry[3].item() == 0
            if last:
                break
            cut += 1
        assert not last or peak == best, case.name
    assert cut > 10, "few budgets ended a solve: the test sees nothing"


def test_more_sweeps_never_raise_the_peak() -> None:
    for case in instances(1, seed=6100, max_ranks=32):
        peaks = [solve(case, budget=0, sweeps=sweeps).peak.item() for sweeps in range(6)]
        assert peaks == sorted(peaks, reverse=True), case.name


def test_layers_at_once_equal_one_by_one() -> None:
    cases = [case for seed in range(20) for case in [draw("split_256", 16, seed)]]
    layers = torch.from_numpy(np.stack([case.slot_to_expert for case in cases]))
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    fixed = torch.arange(20 * 16, dtype=torch.int32).view(20, 16)
    ticks = torch.arange(1000, 1016, dtype=torch.int32)
    tables = ops.replica_tables(layers, 16, 256)
    for options in ({}, {"ticks": ticks, "tolerance": 0.01}):
        together = ops.plan_exact(loads, tables, fixed, **options)
        summed = ops.plan_exact(loads.sum(1, dtype=torch.int32), tables, fixed, **options)
        for i in range(20):
            alone = ops.plan_exact(loads[i], tables[i], fixed[i], **options)
            for field in range(4):
                assert torch.equal(together[field][i], alone[field])
                assert torch.equal(together[field][i], summed[field][i])


def test_sources_are_summed() -> None:
    for case in instances(1, seed=7000, max_ranks=32):
        summed = ops.plan_exact(torch.from_numpy(case.expert_loads()).int(), case.tables())
        for mine, theirs in zip(solve(case), summed, strict=True):
            assert torch.equal(mine, theirs), case.name


def test_the_largest_costs_do_not_overflow() -> None:
    """2^31 - 1 copies at 2^20 ticks each, alone and in halves."""
    slots = torch.tensor([0, 0], dtype=torch.int32)
    loads, ticks = torch.tensor([MAX_COPIES], dtype=torch.int32), torch.full((2,), 2**20, dtype=torch.int32)
    alone = ops.plan_exact(loads, ops.replica_tables(slots[:1], 1, 1), ticks=ticks[:1], tolerance=1000)
    assert alone.peak.item() == alone.bound.item() == MAX_COPIES << 20
    halves = ops.plan_exact(loads, ops.replica_tables(slots, 2, 1), ticks=ticks)
    assert halves.peak.item() == halves.bound.item() == 2**30 << 20
    assert sorted(halves.quota.tolist()) == [2**30 - 1, 2**30]


def test_unlimited_budget_may_be_any_large_number() -> None:
    tables = ops.replica_tables(SLOTS, 4, 4)
    assert torch.equal(
        ops.plan_exact(LOADS, tables, budget=10**30).quota, ops.plan_exact(LOADS, tables).quota
    )
