"""plan_lp: HiGHS's optimum within its tolerance, certified, a status that is true, the reference's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.tables import ReplicaTables
from support.cases import FAMILIES, Case, draw, eplb, families_up_to, instances
from support.exact_splits import SLOTS, int32
from support.oracles import lp_value
from support.processes import run_ranks
from support.relaxed_layers import layers
from support.sweeps import slow

PER_CASE = 10
MAX_RANKS = 72
ACCURACY = {torch.float32: (1e-4, 12), torch.float64: (1e-8, 20)}  # relative error, iterations
DTYPES = list(ACCURACY)
CONVERGED, OPEN, BROKE_DOWN = range(3)


def rounding(case: Case, dtype: torch.dtype) -> float:
    """Relative, of sums over a rank's slots or an expert's ranks."""
    return torch.finfo(dtype).eps * (case.slots_per_rank + case.num_ranks + 8)


def solve(case: Case, dtype: torch.dtype, **options: Any) -> ops.LpSplit:
    return ops.plan_lp(torch.from_numpy(case.loads), case.tables(), dtype=dtype, **options)


def check_split(case: Case, split: ops.LpSplit, base: Tensor | None = None) -> None:
    """What holds whatever the status: experts are conserved, primal is this split's, dual is below."""
    eps = rounding(case, split.split.dtype)
    assert all(torch.isfinite(field).all() and (field >= 0).all() for field in split), case.name
    parts, held = split.split.double().numpy(), case.slot_to_expert
    per_expert = np.zeros(case.num_experts)
    np.add.at(per_expert, held[held >= 0], parts[held >= 0])
    np.testing.assert_allclose(per_expert, case.expert_loads(), rtol=eps, err_msg=case.name)
    assert not parts[held < 0].any(), case.name
    carried = parts.reshape(case.num_ranks, -1).sum(1) + (0 if base is None else base.double().numpy())
    assert split.primal.item() == pytest.approx(carried.max(), rel=eps), case.name
    assert split.dual.item() <= split.primal.item() * (1 + eps), case.name


def check_optimum(case: Case, base: np.ndarray | None = None) -> None:
    """Both dtypes against HiGHS, on the problem as float32 represents it."""
    carried = None if base is None else torch.from_numpy(base).float().double()
    exact = None if carried is None else carried.numpy()
    best = lp_value(case.expert_loads(), case.slot_to_expert, case.num_ranks, exact)
    for dtype, (error, most) in ACCURACY.items():
        given = None if carried is None else carried.to(dtype)
        split, eps = solve(case, dtype, base=given), rounding(case, dtype)
        check_split(case, split, given)
        what = (case.name, dtype, best, split[1:])
        assert split.status.item() == CONVERGED and split.iterations.item() <= most, what
        assert split.primal.item() - best <= error * best, what
        assert split.primal.item() >= best * (1 - eps), what
        assert best * (1 - error - eps) <= split.dual.item() <= best * (1 + eps), what


def random_base(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[R]: a tenth of the loads, as much, or ten times as much, on some of the ranks."""
    mean = case.total / case.num_ranks + 1
    return rng.random(case.num_ranks) * rng.choice([0.1, 1, 10]) * mean * rng.integers(0, 2, case.num_ranks)


def test_there_are_two_thousand_instances() -> None:
    sizes = [ranks for family in FAMILIES.values() for ranks in family.ranks if ranks <= MAX_RANKS]
    assert PER_CASE * len(sizes) >= 2000


@pytest.mark.parametrize(("per_case", "every"), [(1, 4), *slow((PER_CASE, 1))])
@pytest.mark.parametrize("family", families_up_to(MAX_RANKS))
def test_optimum(family: str, per_case: int, every: int) -> None:
    for case in instances(per_case, seed=1000, max_ranks=MAX_RANKS, families=(family,), every=every):
        check_optimum(case)


@pytest.mark.parametrize(("per_case", "every"), [(1, 4), *slow((2, 1))])
@pytest.mark.parametrize("family", families_up_to(MAX_RANKS))
def test_optimum_with_base(family: str, per_case: int, every: int) -> None:
    rng = np.random.default_rng(list(FAMILIES).index(family))
    for case in instances(per_case, seed=1100, max_ranks=MAX_RANKS, families=(family,), every=every):
        check_optimum(case, random_base(rng, case))


@pytest.mark.parametrize("ranks", [96, 128, 300, 1024])
def test_optimum_in_wide_groups(ranks: int) -> None:
    """The normal equations have one unknown per rank, or per replicated expert if there are fewer."""
    for family in ("eplb", "ring", "one_expert"):
        check_optimum(draw(family, ranks, 3))


@pytest.mark.parametrize("total", [50, 5_000, 1_000_000])
@pytest.mark.parametrize("replicated", [True, False])
def test_all_load_on_one_expert(replicated: bool, total: int) -> None:
    rng = np.random.default_rng(total)
    for seed in range(10):
        slots, loads = eplb(rng, int(rng.integers(2, 33)))
        copies = np.bincount(slots[slots >= 0], minlength=loads.shape[1])
        hot = rng.choice(np.flatnonzero((copies > 1) == replicated)) if (copies == 1).any() else 0
        loads[:] = 0
        loads[0, hot] = total
        check_optimum(Case(f"one expert#{seed}", slots, loads))


@pytest.mark.parametrize("family", ["eplb", "duplicates", "empty_slots", "one_expert"])
def test_most_copies(family: str) -> None:
    """Sums of almost 2^31 copies; experts without load."""
    for seed in range(5):
        case = draw(family, 16, seed)
        scaled = case.loads.astype(np.float64) * ((2**31 - 1) / max(case.total, 1))
        loads = np.floor(scaled).astype(np.int32)
        loads[:, ::7] = 0
        check_optimum(Case(case.name, case.slot_to_expert, loads))


@pytest.mark.parametrize("family", ["eplb", "random", "ring"])
def test_ranks_without_experts(family: str) -> None:
    """Dead ranks: their slots are empty, and they take nothing."""
    for seed in range(5):
        case = draw(family, 16, seed)
        slots = case.slot_to_expert.copy().reshape(16, -1)
        slots[seed::5] = -1
        loads = case.loads.copy()
        loads[:, np.setdiff1d(np.arange(case.num_experts), slots)] = 0
        check_optimum(Case(case.name, slots.reshape(-1), loads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_status_is_true(dtype: torch.dtype) -> None:
    """However early it is cut: the certificate is that of the split, and the status says what it says."""
    cut = 0
    for case in instances(1, seed=1200, max_ranks=32):
        best = lp_value(case.expert_loads(), case.slot_to_expert, case.num_ranks)
        for tolerance, most in ((None, 0), (None, 1), (None, 2), (0.05, 2), (1e-5, 3)):
            split = solve(case, dtype, iterations=most, tolerance=tolerance)
            check_split(case, split)
            primal, dual = split.primal.item(), split.dual.item()
            eps = rounding(case, dtype)
            assert dual <= best * (1 + eps) and best <= primal * (1 + eps), case.name
            wanted = ACCURACY[dtype][0] if tolerance is None else tolerance
            converged = primal - dual <= wanted * primal * (1 + 1e-3)
            assert split.status.item() == (CONVERGED if converged else OPEN), case.name
            assert split.iterations.item() == most or converged, case.name
            cut += not converged
    assert cut > 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_breakdown_says_so(dtype: torch.dtype) -> None:
    """Without a tolerance mu falls until x / z overflows: the start is returned, with the bound proved before."""
    broke = 0
    for seed in range(20):
        case = draw("split_256", 8, seed)
        options: dict[str, Any] = {"tolerance": 0.0, "iterations": 1000}
        split = solve(case, dtype, **options)
        check_split(case, split)
        if split.status.item() == BROKE_DOWN:
            assert_equal_split(case, dtype=dtype, **options)
            start = solve(case, dtype, iterations=0)
            assert torch.equal(split.split, start.split) and torch.equal(split.primal, start.primal)
            assert start.dual <= split.dual <= split.primal
            broke += 1
    assert broke > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"iterations": 2}, {"tolerance": 0.0, "iterations": 30}])
def test_equals_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    for case in instances(1, seed=2000, max_ranks=16):
        assert_equal_split(case, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_with_base(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(23)
    for case in [*instances(1, seed=2100, max_ranks=16), draw("eplb", 65, 0), draw("eplb", 128, 0)]:
        assert_equal_split(case, dtype=dtype, base=torch.from_numpy(random_base(rng, case)).to(dtype))


def assert_equal_split(case: Case, **options: Any) -> None:
    split = ops.plan_lp(torch.from_numpy(case.loads), case.tables(), **options)
    expected = reference.plan_lp(torch.from_numpy(case.loads), case.tables(), **options)
    for field, mine, theirs in zip(split._fields, split, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), (case.name, field, mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_at_once_equal_one_by_one(dtype: torch.dtype) -> None:
    loads, tables, options = layers(dtype)
    together = ops.plan_lp(loads, tables, dtype=dtype, **options)
    summed = ops.plan_lp(loads.sum(1, dtype=torch.int32), tables, dtype=dtype, **options)
    expected = reference.plan_lp(
        loads[:3], tables_of(tables, 3), dtype=dtype, **{**options, "base": options["base"][:3]}
    )
    for i in range(20):
        given = {**options, "base": options["base"][i]}
        alone = ops.plan_lp(loads[i], tables[i], dtype=dtype, **given)
        for all_layers, all_summed, one in zip(together, summed, alone, strict=True):
            assert torch.equal(all_layers[i], one) and torch.equal(all_summed[i], one)
    assert all(torch.equal(mine[:3], theirs) for mine, theirs in zip(together, expected, strict=True))
    none = ops.plan_lp(loads[:0], tables_of(tables, 0), dtype=dtype)
    assert [tuple(field.shape) for field in none] == [(0, tables.num_slots), (0,), (0,), (0,), (0,)]


def tables_of(tables: ReplicaTables, layers: int) -> ReplicaTables:
    return ReplicaTables(tables.data[:layers], tables.num_ranks, tables.num_experts, tables.num_slots)


def test_all_ranks_of_a_group_agree() -> None:
    def body(rank: int) -> list[bytes]:
        results = []
        for dtype in DTYPES:
            loads, tables, options = layers(dtype)
            gathered = [torch.empty_like(loads) for _ in range(3)]
            torch.distributed.all_gather(gathered, loads + rank)
            results += [f.numpy().tobytes() for f in ops.plan_lp(gathered[1], tables, dtype=dtype, **options)]
        return results

    first, *others = run_ranks(body, 3)
    assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_decide(dtype: torch.dtype) -> None:
    """Solved before the first iteration: no loads, no replicated expert, one rank, what cannot move decides."""
    tables = ops.replica_tables(SLOTS, 4, 4)
    base = torch.tensor([0, 0, 0, 9], dtype=dtype)
    solo = ops.replica_tables(int32(0, 1, 2, 3), 2, 4)
    for split, cost in (
        (ops.plan_lp(int32(0, 0, 0, 0), tables, dtype=dtype), 0),
        (ops.plan_lp(int32(0, 0, 0, 0), tables, dtype=dtype, base=base), 9),
        (ops.plan_lp(int32(1, 2, 3, 0), tables, dtype=dtype, base=base), 9),
        (ops.plan_lp(LOADS, solo, dtype=dtype), 15),
        (ops.plan_lp(LOADS, ops.replica_tables(SLOTS, 1, 4), dtype=dtype), 26),
    ):
        assert split.primal.item() == split.dual.item() == cost
        assert (split.iterations.item(), split.status.item()) == (0, CONVERGED)


LOADS = int32(5, 6, 7, 8)
