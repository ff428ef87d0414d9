"""The bench's bound of spill_cost: below every plan, and near the optimum that another MILP proves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.level_cases import LevelCase, in_order
from support.spill_bounds import least_cost_bound as bound_by_expert


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from lib import spill_bound

    return spill_bound


def draw_small(seed: int, spare: int) -> LevelCase:
    rng = np.random.default_rng([11, seed])
    ranks, per_rank = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    weights = rng.lognormal(0, 1.5, ranks * per_rank)
    loads = rng.multinomial(int(rng.integers(50, 3000)), weights / weights.sum())
    return in_order(loads, ranks, spare, f"draw {seed}")


def cost_of(case: LevelCase, price: int) -> int:
    """What a plan costs that fills with imports of this price."""
    fill = case.fill(import_costs=(price, price))
    return case.peak(fill.slot_to_expert) + price * int(fill.telemetry[1])


def rows_of(case: LevelCase) -> list[list[int]]:
    return case.loads.reshape(case.num_ranks, -1).tolist()


@pytest.mark.slow
def test_never_above_the_optimum_and_near_it(bench: ModuleType) -> None:
    """With spare slots for every expert, where the bound loses nothing but what chunks may not tell apart."""
    gaps, paid = [], 0
    for seed in range(60):
        case, price = draw_small(seed, 9), int(np.random.default_rng(seed).integers(1, 200))
        plain, optimum = int(case.plain().max()), bound_by_expert(case, price, gap=0.0)
        bound = bench.least_cost_bound(rows_of(case), price, plain, exactness=0)
        print(f"{case.name}: bound {bound}, optimum {optimum:.3f}, plain EP {plain}, price {price}")
        assert bound <= np.ceil(optimum - 1e-3), case.name
        gaps.append(1 - bound / optimum)
        paid += optimum < plain - 0.5
    assert paid > 20 and np.mean(gaps) < 0.001 and max(gaps) < 0.02, (paid, np.mean(gaps), max(gaps))


@pytest.mark.parametrize("spare", [1, 2, 9])
def test_never_above_a_plan(bench: ModuleType, spare: int) -> None:
    for seed in range(100, 160):
        case = draw_small(seed, spare)
        level = cost_of(case, 40)
        assert bench.least_cost_bound(rows_of(case), 40, level) <= level, case.name


def test_named(bench: ModuleType) -> None:
    found = {
        "balanced": bench.least_cost_bound([[5], [5]], 1, 5),
        "no import pays": bench.least_cost_bound([[60], [40]], 20, 60),
        "one import": bench.least_cost_bound([[60], [40]], 10, 60, exactness=0),
        "two of one rank": bench.least_cost_bound([[90, 0], [0, 0], [0, 0]], 3, 90, exactness=0),
        "relays cost more": bench.least_cost_bound([[10, 10], [10, 10], [0, 0]], 2, 20, exactness=0),
        "no copies": bench.least_cost_bound([[0], [0]], 1, 0),
    }
    assert found == {
        "balanced": 5,
        "no import pays": 60,
        "one import": 55,
        "two of one rank": 32,
        "relays cost more": 15,
        "no copies": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("spare", [1, 2])
def test_the_bound_of_few_slots_is_below_the_optimum_and_near_it(bench: ModuleType, spare: int) -> None:
    gaps = []
    for seed in range(200, 220):
        case = draw_small(seed, spare)
        optimum = bound_by_expert(case, 0, gap=0.0)
        bound = bench.level_bound(rows_of(case), spare)
        reached = case.peak(case.fill().slot_to_expert)
        assert bound <= optimum + 1e-3 and bound <= reached
        assert np.ceil(bound - 1e-3) >= bench.slots_bound(rows_of(case), 0, spare), "the looser bound"
        gaps.append(1 - bound / optimum)
    assert np.mean(gaps) < 0.01, np.mean(gaps)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [1, 2])
def test_the_bound_of_few_slots_with_a_price(bench: ModuleType, spare: int) -> None:
    tighter = 0
    for seed in range(300, 320):
        case, price = draw_small(seed, spare), 20
        level = cost_of(case, price)
        optimum = bound_by_expert(case, price, gap=0.0)
        free, paid = (bench.level_bound(rows_of(case), spare, price=n) for n in (0, price))
        bound = bench.level_bound(rows_of(case), spare, price=price, level=level)
        assert free <= paid + 1e-6 and paid <= bound + 1e-6 and bound <= optimum + 1e-3, case.name
        tighter += bound > free + 1
    assert tighter > 10, tighter


def test_the_bound_within_nodes(bench: ModuleType) -> None:
    homes = [[40, 40], [0, 0], [0, 0], [0, 0]]
    assert bench.level_bound(homes, 2) == pytest.approx(20)
    assert bench.level_bound(homes, 2, ranks_per_node=2) == pytest.approx(40)
    assert bench.level_bound(homes, 1, ranks_per_node=2) == pytest.approx(40)
