"""plan_lp: HiGHS's optimum within its tolerance, certified, a status that is true, the reference's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.replica_tables import ReplicaTables
from support.cases import FAMILIES, Case, draw, eplb, families_up_to, instances
from support.exact_splits import int32, strided
from support.oracles import lp_value
from support.processes import run_ranks
from support.relaxed_layers import SLOTS, layers, reals
from support.sweeps import sweep

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


def check_split(case: Case, split: ops.LpSplit, speeds: Tensor | None, base: Tensor | None) -> None:
    """What holds whatever the status: experts are conserved, primal is this split's, dual is below."""
    eps = rounding(case, split.split.dtype)
    assert all(torch.isfinite(field).all() and (field >= 0).all() for field in split), case.name
    parts, held = split.split.double().numpy(), case.slot_to_expert
    per_expert = np.zeros(case.num_experts)
    np.add.at(per_expert, held[held >= 0], parts[held >= 0])
    np.testing.assert_allclose(per_expert, case.expert_loads(), rtol=eps, err_msg=case.name)
    assert not parts[held < 0].any(), case.name
    carried = parts.reshape(case.num_ranks, -1).sum(1) + (0 if base is None else base.double().numpy())
    speed = np.ones(case.num_ranks) if speeds is None else speeds.double().numpy()
    assert not carried[speed == 0].any(), f"{case.name}: copies on a rank without speed"
    cost = np.divide(carried, speed, out=np.zeros_like(carried), where=speed > 0).max()
    assert split.primal.item() == pytest.approx(cost, rel=eps), case.name
    assert split.dual.item() <= split.primal.item() * (1 + eps), case.name


def check_optimum(case: Case, speeds: np.ndarray | None = None, base: np.ndarray | None = None) -> None:
    """Both dtypes against HiGHS, on the problem as float32 holds it."""
    inputs = {
        name: torch.from_numpy(value).float()
        for name, value in (("speeds", speeds), ("base", base))
        if value is not None
    }
    exact = {name: value.double().numpy() for name, value in inputs.items()}
    best = lp_value(case.expert_loads(), case.slot_to_expert, case.num_ranks, **exact)
    for dtype, (error, most) in ACCURACY.items():
        given = {name: value.to(dtype) for name, value in inputs.items()}
        split, eps = solve(case, dtype, **given), rounding(case, dtype)
        check_split(case, split, given.get("speeds"), given.get("base"))
        what = (case.name, dtype, best, split[1:])
        assert split.status.item() == CONVERGED and split.iterations.item() <= most, what
        assert split.primal.item() - best <= error * best, what
        assert split.primal.item() >= best * (1 - eps), what
        assert best * (1 - error - eps) <= split.dual.item() <= best * (1 + eps), what


def random_speeds(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[R]: nearly equal, two kinds, or spread over a factor of ten; some are 0 where every expert has another."""
    kind = rng.integers(3)
    ranks = case.num_ranks
    speeds = (
        rng.uniform(0.9, 1.1, ranks),
        rng.choice([0.5, 1.0], ranks),
        10 ** rng.uniform(-0.5, 0.5, ranks),
    )[kind]
    for r in rng.permutation(ranks)[: ranks // 4]:
        without = np.flatnonzero(speeds > 0).tolist()
        without = set(without) - {int(r)}
        if all(held & without for held in case.rank_sets() if held):
            speeds[r] = 0
    return speeds


def random_base(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[R]: a tenth of the loads, as much, or ten times as much, on some of the ranks."""
    mean = case.total / case.num_ranks + 1
    return rng.random(case.num_ranks) * rng.choice([0.1, 1, 10]) * mean * rng.integers(0, 2, case.num_ranks)


def test_there_are_two_thousand_instances() -> None:
    sizes = [ranks for family in FAMILIES.values() for ranks in family.ranks if ranks <= MAX_RANKS]
    assert PER_CASE * len(sizes) >= 2000


@sweep("per_case", 1, PER_CASE)
@pytest.mark.parametrize("family", families_up_to(MAX_RANKS))
def test_optimum(family: str, per_case: int) -> None:
    for case in instances(per_case, seed=1000, max_ranks=MAX_RANKS, families=(family,)):
        check_optimum(case)


@pytest.mark.parametrize("family", families_up_to(MAX_RANKS))
def test_optimum_with_speeds_and_base(family: str) -> None:
    rng = np.random.default_rng(list(FAMILIES).index(family))
    for i, case in enumerate(instances(2, seed=1100, max_ranks=MAX_RANKS, families=(family,))):
        if i % 2:
            check_optimum(case, random_speeds(rng, case))
        else:
            speeds = random_speeds(rng, case)
            check_optimum(case, speeds, random_base(rng, case) * (speeds > 0))


@pytest.mark.parametrize("ranks", [96, 128, 300, 1024])
def test_optimum_in_wide_groups(ranks: int) -> None:
    """The network is dense in the ranks, or in the replicated experts if there are fewer."""
    rng = np.random.default_rng(ranks)
    for family in ("eplb", "ring", "one_expert"):
        check_optimum(draw(family, ranks, 3))
    check_optimum(draw("eplb", ranks, 4), rng.uniform(0.5, 2, ranks))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_status_is_true(dtype: torch.dtype) -> None:
    """However early it is cut: the certificate is that of the split, and the status says what it says."""
    cut = 0
    for case in instances(1, seed=1200, max_ranks=32):
        best = lp_value(case.expert_loads(), case.slot_to_expert, case.num_ranks)
        for tolerance, most in ((None, 0), (None, 1), (None, 2), (0.05, 2), (1e-5, 3)):
            split = solve(case, dtype, iterations=most, tolerance=tolerance)
            check_split(case, split, None, None)
            primal, dual = split.primal.item(), split.dual.item()
            eps = rounding(case, dtype)
            assert dual <= best * (1 + eps) and best <= primal * (1 + eps), case.name
            wanted = ACCURACY[dtype][0] if tolerance is None else tolerance
            converged = primal - dual <= wanted * primal * (1 + 1e-3)
            assert split.status.item() == (CONVERGED if converged else OPEN), case.name
            assert split.iterations.item() == most or converged, case.name
            cut += not converged
    assert cut > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_breakdown_says_so(dtype: torch.dtype) -> None:
    """Speeds that the dtype's range cannot carry: the start is returned, with a bound."""
    broke = 0
    for seed in range(20):
        case = draw("split_256", 8, seed)
        top = 38 if dtype is torch.float32 else 300
        speeds = torch.from_numpy(10.0 ** np.random.default_rng(seed).uniform(-top, top, 8)).to(dtype)
        split = solve(case, dtype, speeds=speeds)
        assert_equal_split(case, dtype=dtype, speeds=speeds)
        if split.status.item() == BROKE_DOWN:
            broke += 1
            start = solve(case, dtype, speeds=speeds, iterations=0)
            assert torch.equal(split.split, start.split) and torch.equal(split.primal, start.primal)
            assert split.dual <= split.primal
    assert broke > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"iterations": 2}, {"tolerance": 0.0, "iterations": 30}])
def test_equals_reference(options: dict[str, Any], dtype: torch.dtype) -> None:
    for case in instances(1, seed=2000, max_ranks=16):
        assert_equal_split(case, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_with_speeds_and_base(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(23)
    for case in [*instances(1, seed=2100, max_ranks=16), draw("eplb", 65, 0), draw("eplb", 128, 0)]:
        speeds = random_speeds(rng, case)
        base = torch.from_numpy(random_base(rng, case) * (speeds > 0)).to(dtype)
        assert_equal_split(case, dtype=dtype, speeds=torch.from_numpy(speeds).to(dtype), base=base)


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


def test_inputs_need_not_be_contiguous() -> None:
    loads, tables, options = layers(torch.float32)
    apart = ReplicaTables(strided(tables.data), tables.num_ranks, tables.num_experts, tables.num_slots)
    spread = {name: strided_reals(value) for name, value in options.items()}
    for mine, theirs in zip(
        ops.plan_lp(strided(loads), apart, **spread), ops.plan_lp(loads, tables, **options), strict=True
    ):
        assert torch.equal(mine, theirs)


def strided_reals(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_decide(dtype: torch.dtype) -> None:
    """Solved before the first iteration: no loads, no replicated expert, one rank, what cannot move decides."""
    tables = ops.replica_tables(SLOTS, 4, 4)
    base = torch.tensor([0, 0, 0, 9], dtype=dtype)
    solo = ops.replica_tables(int32(0, 1, 2, 3), 2, 4)
    for split, cost in (
        (ops.plan_lp(int32(0, 0, 0, 0), tables, dtype=dtype), 0),
        (ops.plan_lp(int32(0, 0, 0, 0), tables, dtype=dtype, speeds=torch.zeros(4, dtype=dtype)), 0),
        (ops.plan_lp(int32(0, 0, 0, 0), tables, dtype=dtype, base=base), 9),
        (ops.plan_lp(int32(1, 2, 3, 0), tables, dtype=dtype, base=base), 9),
        (ops.plan_lp(LOADS, solo, dtype=dtype), 15),
        (ops.plan_lp(LOADS, ops.replica_tables(SLOTS, 1, 4), dtype=dtype), 26),
    ):
        assert split.primal.item() == split.dual.item() == cost
        assert (split.iterations.item(), split.status.item()) == (0, CONVERGED)


LOADS = int32(5, 6, 7, 8)
NAN, INF = float("nan"), float("inf")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loads dtype": ({"loads": LOADS.long()}, "loads must be int32, got int64"),
    "loads scalar": ({"loads": LOADS[0]}, r"loads must be \[E\] or \[4, E\] per layer, got \[\]"),
    "sources": ({"loads": LOADS.expand(3, 4)}, r"loads must be \[E\] or \[4, E\] per layer, got \[3, 4\]"),
    "experts": ({"loads": int32(1, 2, 3)}, "tables must be those of 3 experts in 8 slots"),
    "negative": ({"loads": int32(5, -1, 7, 8)}, "loads must not be negative, got -1 for expert 1"),
    "overflow": (
        {"loads": int32(2**31 - 1, 1, 0, 0)},
        r"loads must sum to less than 2\^31 copies, got 2147483648",
    ),
    "no replica": (
        {"slots": int32(0, 1, 1, 2, 2, 0, -1, -1)},
        "loads must be 0 for an expert without a replica, got copies for expert 3",
    ),
    "dtype": ({"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64, got torch.float16"),
    "speeds dtype": ({"speeds": reals(1, 1, 1, 1).double()}, "speeds must be float32, got float64"),
    "speeds dtype 64": (
        {"speeds": reals(1, 1, 1, 1), "dtype": torch.float64},
        "speeds must be float64, got float32",
    ),
    "speeds shape": ({"speeds": reals(1, 1)}, r"speeds must have shape \[4\], got \[2\]"),
    "speeds nan": (
        {"speeds": reals(1, NAN, 1, 1)},
        "speeds must be finite and not negative, got nan for rank 1",
    ),
    "speeds inf": (
        {"speeds": reals(1, 1, INF, 1)},
        "speeds must be finite and not negative, got inf for rank 2",
    ),
    "speeds negative": (
        {"speeds": reals(1, 1, 1, -2)},
        "speeds must be finite and not negative, got -2 for rank 3",
    ),
    "speed 0, solo": (
        {"speeds": reals(1, 1, 1, 0)},
        "speeds must be positive on one of an expert's ranks, got 0 for rank 3, where expert 3 has copies",
    ),
    "speed 0, split": (
        {"speeds": reals(1, 0, 0, 1)},
        "speeds must be positive on one of an expert's ranks, got 0 for rank 1, where expert 2 has copies",
    ),
    "speed 0, base": (
        {"speeds": reals(1, 0, 1, 1), "base": reals(0, 2.5, 0, 0)},
        "speeds must be positive on ranks with base load, got 0 for rank 1 with base 2.5",
    ),
    "base dtype": ({"base": LOADS}, "base must be float32, got int32"),
    "base shape": ({"base": reals(1, 1, 1)}, r"base must have shape \[4\], got \[3\]"),
    "base nan": ({"base": reals(NAN, 0, 0, 0)}, "base must be finite and not negative, got nan for rank 0"),
    "base negative": (
        {"base": reals(0, 0, -1, 0)},
        "base must be finite and not negative, got -1 for rank 2",
    ),
    "tolerance": ({"tolerance": -1e-3}, r"tolerance must be in 0..1 \(relative\), got -0.001"),
    "tolerance high": ({"tolerance": 1.5}, r"tolerance must be in 0..1 \(relative\), got 1.5"),
    "tolerance nan": ({"tolerance": NAN}, r"tolerance must be in 0..1 \(relative\), got nan"),
    "iterations": ({"iterations": -1}, "iterations must be in 0..1000, got -1"),
    "many iterations": ({"iterations": 1001}, "iterations must be in 0..1000, got 1001"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    changed, message = REFUSED[name]
    arguments = {"loads": LOADS, "slots": SLOTS, **changed}
    arguments["tables"] = ops.replica_tables(arguments.pop("slots"), 4, 4)
    with pytest.raises(ValueError, match=message):
        ops.plan_lp(**arguments)


def test_refuses_layers_that_do_not_match() -> None:
    tables = ops.replica_tables(SLOTS.expand(40, 8), 4, 4)
    with pytest.raises(ValueError, match=r"loads must have one entry per layer \(40\), got \[2, 4\]"):
        ops.plan_lp(LOADS.expand(2, 4), tables)
    with pytest.raises(ValueError, match=r"base must have shape \[40, 4\], got \[4\]"):
        ops.plan_lp(LOADS.expand(40, 4), tables, base=reals(1, 1, 1, 1))
    loads = LOADS.repeat(40, 1)
    loads[33, 1] = -7
    with pytest.raises(ValueError, match="loads must not be negative, got -7 for expert 1"):
        ops.plan_lp(loads, tables)


def test_opcheck() -> None:
    tables = ops.replica_tables(SLOTS, 4, 4)
    op = torch.ops.isoload.plan_lp.default
    torch.library.opcheck(op, (LOADS, tables.data, 4, 8, None, None, False, 1e-4, 12))
    ones = torch.ones(4, dtype=torch.float64)
    batched = (
        LOADS.expand(3, 4, 4),
        tables.data.expand(3, -1),
        4,
        8,
        ones,
        ones.expand(3, 4),
        True,
        1e-8,
        20,
    )
    torch.library.opcheck(op, batched)
