"""bench_libra: which batches calibrate, and a run of small streams."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from isoload.replay.calibration import Fold
from isoload.trace import Trace, write_trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_libra

EXPERTS, LAYERS, K = 16, 3, 2


def draw(tokens: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(EXPERTS, 0.3)) + 1e-3
    ids = [rng.choice(EXPERTS, K, replace=False, p=shares / shares.sum()) for _ in range(tokens * LAYERS)]
    return Trace("drawn", EXPERTS, topk_ids=np.array(ids, np.int32).reshape(tokens, LAYERS, K))


def test_first_halves_calibrate_and_second_halves_are_shuffled() -> None:
    traces = [draw(100, 1), draw(60, 2)]
    trace, fold = bench_libra.joined(traces, 32)
    assert fold == Fold((0, 1), (2, 3)) and trace.topk_ids is not None
    ids = [t.topk_ids for t in traces if t.topk_ids is not None]
    first = np.concatenate([x[: len(x) // 2] for x in ids])
    second = np.concatenate([x[len(x) // 2 :] for x in ids])
    assert np.array_equal(trace.topk_ids[:64], first[:64])
    known = {row.tobytes() for row in second}
    assert all(row.tobytes() in known for row in trace.topk_ids[64:])


def test_figures_of_a_small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_libra, "SPARE", (1, 4))
    trace, fold = bench_libra.joined([draw(300, 3)], 32)
    rows = bench_libra.run(trace, fold, 32, 4, "even", 2)
    found = {(r["policy"], r["spare"], r["predict"]): r for r in rows}
    ahead = len(bench_libra.AHEAD) * len(bench_libra.PREDICTIONS)
    assert len(found) == len(rows) == 2 * (len(bench_libra.IN_TIME) + ahead)
    for row in rows:
        assert row["imbalance_mean"] >= 1 and row["imbalance_p99"] >= row["imbalance_mean"] * 0.9
        assert row["batches"] == 2 and row["layers"] == LAYERS
        if row["policy"] == "hedge":
            assert row["over_bound_max"] == 1
    for kind in bench_libra.PREDICTIONS:
        sharding, exact = (
            found[name, 4, kind]["imbalance_mean"] for name in ("libra", "libra:split_by=exact")
        )
        assert exact <= sharding
    assert found["hedge", 4, "perfect"]["imbalance_mean"] < found["none", 4, "true loads"]["imbalance_mean"]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    console = Console(record=True, file=StringIO())
    assert list(bench_libra.streams(tmp_path, console)) == []
    assert "glm52_domains_a.npz is not there: left out" in console.export_text()
    write_trace(draw(2000, 4), tmp_path / "gptoss20b_decode_mmlu.npz")
    ((trace, fold, tokens, ranks, _),) = bench_libra.streams(tmp_path, Console(quiet=True))
    assert (trace.name, fold, tokens, ranks) == ("gpt-oss-20b", Fold((0,), (1,)), 512, (8,))
