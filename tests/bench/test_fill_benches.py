"""The benches of borrowing run: one instance judged against counts of our own, a cost file that replay can read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from isoload.times.cost import read_cost


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))


@pytest.fixture
def fill(benches: None) -> ModuleType:
    import bench_fill

    return bench_fill


@pytest.fixture
def cost(benches: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import bench_cost
    from lib.harness import Timing

    def one_call(call: Any, units: int = 1, seconds: float = 0, least: int = 0) -> Timing:
        call()
        return Timing(40.0 / units, 50.0)

    monkeypatch.setattr(bench_cost, "measure", one_call)
    monkeypatch.setattr(bench_cost, "BEYOND_CACHES", 1)
    return bench_cost


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


def test_a_cost_file_is_measured_and_read(
    cost: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "cost.json"
    arguments = ["--hidden", "160", "--intermediate", "80", "--out", str(target)]
    monkeypatch.setattr(sys, "argv", ["bench_cost.py", *arguments])
    cost.main()
    model = read_cost(target)
    assert (model.hidden, model.intermediate, model.weight_bytes, model.overhead_us) == (160, 80, 4, 40.0)
    assert [size for size, _ in model.token_us] == list(cost.SIZES)
    assert model.bandwidths == (3.8, 3.8), "160 x 80 x 3 x 4 bytes in 40 us"
    assert "bandwidth between nodes not measured" in model.source
    assert f"pays from {model.break_even[0]} copies" in capsys.readouterr().out


def test_the_kept_cost_file_is_of_a_cpu() -> None:
    model = read_cost(Path(__file__).parents[2] / "bench" / "results" / "cost_cpu.json")
    assert model.source.startswith("bench_cost on ") and min(model.break_even) >= 1
