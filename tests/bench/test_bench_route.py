"""bench_route: figures of a small stream, and the losses that it prints."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_route
from lib.streams import Stream, streams


@pytest.fixture(scope="module")
def small() -> Stream:
    """Two layers of the shipped trace."""
    (stream,) = streams(None)
    trace = stream.trace.select_layers([3, 9])
    batches = replace(stream.batches, trace=trace, counts=stream.batches.counts[:, [3, 9]])
    return replace(stream, trace=trace, batches=batches)


@pytest.mark.parametrize("placer", ["eplb", "grace"])
def test_figures_of_a_small_stream(small: Stream, placer: str) -> None:
    rows = {row["policy"]: row for row in bench_route.bench(small, placer, 2)}
    assert tuple(rows) == bench_route.POLICIES
    drawn, first = rows[bench_route.RANDOM], rows[bench_route.FIRST]
    assert drawn["saved"] == 0 and first["saved"] == 1 and first["node_rows"] < drawn["node_rows"]
    for row in rows.values():
        assert (
            1 <= row["imbalance"] <= row["imbalance_p99"] and row["imbalance"] >= rows["exact"]["imbalance"]
        )
        assert row["node_rows"] <= row["rank_rows"] <= 4 and row["replicas"] > 0
    gained = [rows[policy]["node_rows"] for policy in bench_route.LOCAL]
    assert gained == sorted(gained, reverse=True), "a looser split sends no more rows away"


def test_losses_are_those_of_exact_splits_alone() -> None:
    base = {"trace": "t", "deal": "even", "placer": "eplb", "imbalance": 1.2, "saved": 1.0}
    local = base | {"policy": bench_route.LOCAL[0]}
    rows = [base | {"policy": bench_route.FIRST}, base | {"policy": "none", "saved": 0.0}, local]
    assert bench_route.losses(rows) == []
    assert len(bench_route.losses([*rows, local | {"saved": 0.4}, local | {"imbalance": 1.3}])) == 2
