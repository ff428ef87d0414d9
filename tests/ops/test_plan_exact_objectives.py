"""plan_exact's objectives: the same proved peak from both starts, and what each of them is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import isoload
import reference
from isoload import ops
from isoload.ops import library
from support.cases import FAMILIES, Case, draw, instances
from support.drifted import drifted
from support.exact_splits import LOADS, SLOTS, check_split, int32, optimum, random_fixed, random_ticks, solve
from support.sweeps import slow


def a_divisor(rng: np.random.Generator, ranks: int) -> int:
    return int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0]))


@pytest.mark.parametrize(("per_case", "every"), [(1, 4), *slow((2, 1))])
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_is_the_integral_optimum(family: str, per_case: int, every: int) -> None:
    rng = np.random.default_rng(list(FAMILIES).index(family))
    for case in instances(per_case, seed=9000, max_ranks=128, families=(family,), every=every):
        split = solve(case, objective="local", ranks_per_node=a_divisor(rng, case.num_ranks))
        check_split(case, split)
        assert split.peak.item() == split.bound.item() == optimum(case), case.name


@pytest.mark.parametrize("options", [{}, {"sweeps": 2}, {"tolerance": 0.05, "budget": 2}])
def test_equals_reference(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(19)
    for i, case in enumerate(instances(1, seed=9100, max_ranks=16)):
        drawn: dict[str, Any] = {"objective": "local", "ranks_per_node": a_divisor(rng, case.num_ranks)}
        fixed, ticks = random_fixed(rng, case), random_ticks(rng, case.num_ranks)
        if i % 2:
            drawn["fixed"] = torch.from_numpy(fixed)
        if i % 3 == 2:
            drawn["ticks"] = torch.from_numpy(ticks)
        split = solve(case, **drawn, **options)
        check_split(case, split, fixed if i % 2 else None, ticks if i % 3 == 2 else None)
        expected = reference.plan_exact(torch.from_numpy(case.loads), case.tables(), **drawn, **options)
        for field, mine, theirs in zip(split._fields, split, expected, strict=True):
            assert torch.equal(mine, theirs), (case.name, field, mine, theirs)


def test_equals_reference_in_wide_groups() -> None:
    for ranks in (65, 200, 300):
        case = draw("eplb", ranks, 7)
        split = solve(case, objective="local", ranks_per_node=5)
        expected = reference.plan_exact(
            torch.from_numpy(case.loads), case.tables(), objective="local", ranks_per_node=5
        )
        assert all(torch.equal(*fields) for fields in zip(split, expected, strict=True)), case.name


def test_peaks_agree_whatever_else_is_asked() -> None:
    """With fixed loads, ticks and a pour: both starts end at one optimum."""
    rng = np.random.default_rng(20)
    for case in instances(1, seed=9200, max_ranks=32):
        if case.total > 2**30:
            continue
        asked = {
            "fixed": torch.from_numpy(random_fixed(rng, case)),
            "ticks": torch.from_numpy(random_ticks(rng, case.num_ranks)),
            "pour": torch.tensor(case.total // 8, dtype=torch.int32),
        }
        mine, other = solve(case, **asked), solve(case, **asked, objective="local")
        assert mine.peak.item() == other.peak.item() == other.bound.item(), case.name


def test_more_budget_never_raises_the_peak() -> None:
    for case in instances(1, seed=9300, max_ranks=16):
        peaks = [solve(case, objective="local", budget=budget).peak.item() for budget in range(8)]
        assert peaks == sorted(peaks, reverse=True), case.name


def sent_off_node(case: Case, split: ops.ExactSplit, ranks_per_node: int) -> int:
    share = ops.share(torch.from_numpy(case.loads), split.quota, case.tables(), ranks_per_node)
    source = torch.arange(case.num_ranks)[:, None] // ranks_per_node
    target = torch.arange(len(case.slot_to_expert))[None] // case.slots_per_rank // ranks_per_node
    return int(share[source != target].sum())


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize(("ranks", "replicas"), [(16, 32), (64, 128)])
@pytest.mark.parametrize("tokens", [2048, 16384])
def test_local_sends_fewer_copies_off_node(ranks: int, replicas: int, tokens: int, skew: float) -> None:
    """Summed over batches: where all ranks are full and nodes are alike, a single batch may lose a few copies."""
    off_node = {"spread": 0, "local": 0}
    for seed in range(5):
        case = drifted(ranks, replicas, tokens, seed, skew)
        splits = {name: solve(case, objective=name, ranks_per_node=8) for name in off_node}
        assert splits["local"].peak.item() == splits["spread"].peak.item()
        for name, split in splits.items():
            off_node[name] += sent_off_node(case, split, 8)
    assert off_node["local"] < off_node["spread"], off_node


def test_local_by_hand() -> None:
    """Nodes of two ranks; expert 0 on ranks 0, 1 and 2; expert 1 on 3 and 4 only. Nothing needs to move."""
    tables = ops.replica_tables(int32(0, 0, 0, 1, 1, -1), 6, 2)
    loads = torch.zeros(6, 2, dtype=torch.int32)
    loads[:, 0] = int32(5, 7, 3, 4, 0, 6)  # own rank 5, 7, 3; near 4 to rank 2; far 6: one third each
    loads[:, 1] = int32(0, 0, 2, 6, 3, 1)  # own rank 6, 3; near 2 to rank 3, 1 to rank 4
    split = ops.plan_exact(loads, tables, objective="local", ranks_per_node=2, budget=0)
    assert split.quota.tolist() == [7, 9, 9, 8, 4, 0]


def test_layers_at_once_equal_one_by_one() -> None:
    cases = [draw("split_256", 16, seed) for seed in range(20)]
    tables = ops.replica_tables(torch.from_numpy(np.stack([case.slot_to_expert for case in cases])), 16, 256)
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    options: dict[str, Any] = {"objective": "local", "ranks_per_node": 4}
    together = ops.plan_exact(loads, tables, **options)
    for i in range(20):
        for field, alone in zip(together, ops.plan_exact(loads[i], tables[i], **options), strict=True):
            assert torch.equal(field[i], alone)
    checked = reference.plan_exact(loads[:2], tables_of(tables, 2), objective="local", ranks_per_node=4)
    mine = ops.plan_exact(loads[:2], tables_of(tables, 2), objective="local", ranks_per_node=4)
    assert all(torch.equal(*fields) for fields in zip(mine, checked, strict=True))


def tables_of(tables: isoload.ops.tables.ReplicaTables, layers: int) -> isoload.ops.tables.ReplicaTables:
    return isoload.ops.tables.ReplicaTables(
        tables.data[:layers], tables.num_ranks, tables.num_experts, tables.num_slots
    )


@pytest.mark.parametrize("number", [-1, 2])
def test_op_refuses_unknown_objectives(number: int) -> None:
    tables = ops.replica_tables(SLOTS, 4, 4).data
    message = rf"objective must be 0 \(spread\) or 1 \(local\), got {number}"
    with pytest.raises(ValueError, match=message):
        library.call(
            torch.ops.isoload.plan_exact.default,
            LOADS,
            tables,
            4,
            8,
            None,
            None,
            None,
            number,
            4,
            0,
            4,
            9,
            None,
        )


# The policy


def test_policy_passes_the_objective_on() -> None:
    case = drifted(16, 32, 2048, 0)
    placement = isoload.Placement(torch.from_numpy(case.slot_to_expert[None]), isoload.Topology(16, 8), 256)
    loads = torch.from_numpy(case.loads)
    for objective in ("spread", "local"):
        plan = isoload.plan(loads, placement, 0, objective=objective)
        split = solve(case, objective=objective, ranks_per_node=8)
        assert torch.equal(plan.quota, split.quota) and int(plan.peak) == int(plan.bound) == int(split.peak)


def test_policy_needs_sources_for_local_only() -> None:
    assert isoload.POLICIES["exact"]().needs == "sum"
    assert isoload.POLICIES["exact"](objective="local").needs == "per_source"
    placement = isoload.Placement(SLOTS.view(1, 8), isoload.Topology(4, 2), 4)
    isoload.plan(LOADS, placement, 0)
    message = r"loads must be per source rank, \[4, 4\], for policy exact, got the sum \[4\]"
    with pytest.raises(ValueError, match=message):
        isoload.plan(LOADS, placement, 0, objective="local")


@pytest.mark.parametrize("policy", ["exact", "joint"])
def test_refuses_the_objective_packed(policy: str) -> None:
    with pytest.raises(ValueError, match="objective=packed was removed: use policy exact_active"):
        isoload.POLICIES[policy](objective="packed")
    with pytest.raises(ValueError, match="objective=packed was removed: use policy exact_active"):
        isoload.policies.parse_policy(f"{policy}:objective=packed")
