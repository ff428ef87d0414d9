"""The benches of borrowing run: one instance judged against counts of our own."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))


@pytest.fixture
def fill(benches: None) -> ModuleType:
    import bench_fill

    return bench_fill


def test_every_workload_is_judged_at_least_33k_copies(fill: ModuleType) -> None:
    kinds = [kind for kind, _, _ in fill.made()]
    assert set(kinds) == set(fill.KINDS) and len(kinds) == len(fill.KINDS) * len(fill.SHAPES) * 3
    assert all(loads.sum() >= 33_000 for _, _, loads in fill.made())
    assert [kind[:2] for kind in fill.KINDS][:8] == [f"W{i}" for i in range(8)]
    hot = next(loads for kind, ranks, loads in fill.made() if kind == "W7 burst" and ranks == 8)
    assert hot.max() > 1.5 * hot.min(), "the step of W7 is a burst"


def test_an_instance_is_judged_by_bounds_and_peaks(fill: ModuleType) -> None:
    kind, ranks, loads = next(found for found in fill.made() if found[0] == "W2 hot_rank")
    row = fill.judge(kind, ranks, loads)
    mean = loads.sum() / ranks
    assert row["ep_peak"] == loads.reshape(ranks, -1).sum(1).max() / mean == 2.0
    assert 0 <= row["gap_spare8"] <= row["gap_spare2"] < 0.05 and row["llep_peak"] < 1.001
    assert row["llep_published_peak"] == pytest.approx(1.1, abs=0.001)
    imports, most_in, most_out = row["spill_cost_moves"]
    assert most_in <= 1 and most_out <= imports < row["llep_moves"][0], "exports of one rank are dear"


def test_published_moves_are_counted_once_per_expert_and_rank(fill: ModuleType) -> None:
    row = fill.published(np.array([127, 1, 2, 1]), 2)  # two segments of expert 0 go to rank 1
    assert row["llep_published_moves"][1] == row["llep_published_moves"][0]
    assert row["llep_published_peak"] * 65.5 < 127


def test_few_slots_bound(benches: None) -> None:
    from lib.spill_bound import slots_bound

    assert slots_bound([[60], [60], [0]], 0, 1) == 40
    assert slots_bound([[30, 30], [30, 30], [0, 0]], 0, 1) == 45, "rank 2 can get 30"
    assert slots_bound([[30, 30], [30, 30], [0, 0]], 10, 1) == 45
    assert slots_bound([[30, 30], [30, 30], [0, 0]], 2, 2) == 42, "rank 2 gets 38 and pays 4"
    assert slots_bound([[5, 5]], 3, 4) == 10
