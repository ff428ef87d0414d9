"""bench/bench_published.py on made-up kernels and loads, and what its results file must hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.placers import place
from isoload.times import ExpertTime, LayerTime

torch.set_num_threads(1)
PREFILL = ("prefill_in1024", "prefill_in2048", "prefill_in4096")
LABELS = (*PREFILL, "decode_in1800out100", "decode_in2000out100")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """With attention of 10 ms for 16,384 tokens and 1 ms in decode, and GEMMs of 0.5 ms, whatever the wheel says."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import bench_published
    from lib import harness, published_steps

    made = {
        "mla": [
            {"num_heads": 128, "batch_size": requests, "isl": length, "latency": ms}
            for requests, length, ms in ((4, 4096, 9.0), (4, 4096, 11.0), (8, 2048, 10.0), (16, 1024, 10.0))
        ]
        + [
            {"num_heads": heads, "batch_size": 256, "isl": 2048, "latency": 128 / heads}
            for heads in (64, 128)
        ],
        "gem": [
            {"n": n, "k": k, "gemm_dtype": dtype, "m": m, "latency": ms}
            for n, k in ((4096, 7168), (7168, 2048))
            for m in (256, 16_384)
            for dtype, ms in (("fp8_block", 0.5), ("bfloat16", 7.0))
        ],
    }
    monkeypatch.setattr(published_steps, "_rows", lambda pattern: made[pattern[:3]])
    return SimpleNamespace(main=bench_published, steps=published_steps, read=harness.read_results)


def loads(bench: SimpleNamespace, skew: float) -> Any:
    """Two layers; skew 0: every expert alike."""
    draw = np.random.default_rng(0)
    counts = {name: np.rint(1e5 * np.exp(skew * draw.normal(size=(2, 256)))).astype(int) for name in LABELS}
    return bench.main.Recorded(counts, dict(zip(LABELS, "abcdd", strict=True)))


def test_a_step_is_the_sum_of_its_kernels(bench: SimpleNamespace) -> None:
    layers = bench.steps.Layers(np.array([30.0, 40.0]), 10.0, False)
    step = bench.steps.step("prefill", layers, 4, 4096, 16_384)  # the median of 9 and 11, two GEMMs of 0.5
    dense = 3 * (10 + 9 * 1.0)
    assert step.ms == pytest.approx([58 * (10 + 1 + 30) + dense, 58 * (10 + 1 + 40) + dense])
    assert step.hidden_ms == pytest.approx([58 * (10 + 1 + 10) + dense, 58 * 30 + dense])
    assert bench.steps.attention_ms("decode", 256, 2048) == 1.0 and bench.steps.shared_ms(256) == 1.0


def test_layers_of_even_loads_are_the_closed_form(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 us a call, 2 us a slot, 0.01 us a copy, nothing that travels."""
    made = ExpertTime("h100", "made", "fp8", 7168, 2048, 10.0, 2.0, 0.01, 0.0, 1.0, copies_to=8_500)
    monkeypatch.setattr(bench.steps, "constants", lambda phase, ranks: LayerTime(None, made, None))
    counts = np.ones((2, 256))
    placement = place(counts, isoload.Topology(8), 32, "trivial")
    found = bench.steps.moe_layers("prefill", placement, counts, 1024, "none")
    assert found.ms == pytest.approx([0.010 + 0.002 * 32 + 0.01e-3 * 8 * 1024] * 2, rel=0.02)
    assert found.experts_ms == pytest.approx(found.ms[0]) and not found.beyond
    assert bench.steps.moe_layers("prefill", placement, counts, 2048, "none").beyond


def test_shared_copies_are_in_the_load_and_pouring_them_helps(bench: SimpleNamespace) -> None:
    given = loads(bench, 0.6).counts[LABELS[0]]
    shared, plain = (place(given, isoload.Topology(16, 8), 16 + n, "eplb", num_shared=n) for n in (1, 0))
    home, poured = (
        bench.steps.moe_layers("prefill", shared, given[::-1], 2048, split).experts_ms
        for split in ("shared_local", "waterfill")
    )
    assert poured < home
    assert bench.steps.moe_layers("prefill", plain, given[::-1], 2048, "none").experts_ms < home


def test_lmsys_rows_follow_the_loads(bench: SimpleNamespace) -> None:
    rows = bench.main.lmsys(loads(bench, 0.0))
    assert len(rows) == 7 and rows[5]["what"] == "EPLB's speed-up in prefill"
    assert rows[5]["ours"] == pytest.approx([1, 1], abs=0.02)
    skewed = bench.main.lmsys(loads(bench, 1.0))
    assert skewed[5]["ours"][0] > 1.1 and skewed[6]["ours"][1] > 1.1
    assert skewed[3]["ours"] == pytest.approx(rows[3]["ours"])  # perfectly balanced, whatever was recorded
    attention = 61 * 10  # of what the step of a rank's 16,384 tokens takes
    assert rows[0]["ours"][1] < 8e3 * 16_384 / attention


def test_borrowing_is_between_nothing_and_the_busiest_rank(bench: SimpleNamespace) -> None:
    """95 % and a 127th part of the rest on one of 8 ranks, which all the others help with."""
    for row in bench.main.borrowing():
        assert 1 < row["ours"][0] < row["ours"][1] < 8 * 0.96


def test_a_layers_experts_take_longer_with_the_imbalance(bench: SimpleNamespace) -> None:
    rows = {row["what"].split(", ")[2]: row for row in bench.main.libra()}
    level, skewed = rows["Libra"]["ours"][0], rows["SGLang"]["ours"][0]
    assert rows["Lina"]["ours"] == [level, skewed] and 1.4 < skewed / level < 1.5
    assert (round(level, 2), round(skewed, 2)) == (6.37, 9.51)


def test_a_cache_shrinks_by_a_replica_of_each_layer(bench: SimpleNamespace) -> None:
    """60 replicas of 88 MB; 480 slots' experts of 48 ranks and an eighth of the rest are weights."""
    rows = bench.main.cache()
    expert = 3 * 7168 * 2048 * 2 / 1e9
    free = 80 * 0.9 - 60 * 8 * expert - 2 * 11 / 8
    assert rows[1]["ours"][1] == pytest.approx(-100 * 60 * expert / free)
    assert all(row["ours"][0] < row["ours"][1] < 0 for row in rows)


def test_a_whole_model_gains_no_more_than_its_layers(bench: SimpleNamespace) -> None:
    (row,) = bench.main.whole_models(Path(__file__).parents[2] / "bench" / "traces")
    assert row["ours"][0] == 1 and 1.3 < row["ours"][1] < 2


def test_lplb_without_replicas_costs_its_plan(bench: SimpleNamespace) -> None:
    given = loads(bench, 0.6).counts
    saved = bench.main._saved(given[LABELS[0]], given[LABELS[1]], 512)
    assert set(saved) == {"red0", "lp0", "lp", "in_order", "waterfill"}
    assert (saved["lp0"] < 0).all() and (saved["in_order"] > 0).all()


def test_rearrangements_are_in_the_time(bench: SimpleNamespace) -> None:
    row = bench.main.rearranging(loads(bench, 0.0))
    assert row["ours"] == pytest.approx([1 + 24 * 42 / 463.11] * 2, rel=0.05)


def test_an_error_is_that_of_the_middle(bench: SimpleNamespace) -> None:
    row = bench.main.row("what", "source", [1.0, 3.0], (5.0, 1.0), "x", "nothing")
    assert row["ours"] == [1.0, 5.0] and row["error"] == pytest.approx(0.5) and row["inside"]
    assert not bench.main.row("what", "source", [0.9, 3.0], (5.0, 1.0), "x", "")["inside"]


def test_the_bounds_of_the_page(bench: SimpleNamespace) -> None:
    """What docs/published.md says of the results file, by hand."""
    rows = bench.read("bench_published")
    rates = [row for row in rows if "tokens/s" in row["what"]]
    assert len(rates) == 5 and max(abs(row["error"]) for row in rates) <= 0.15
    speed_up = {row["what"].split()[-1]: row for row in rows if "EPLB's speed-up" in row["what"]}
    assert speed_up["prefill"]["inside"] and not speed_up["decode"]["inside"]
    assert speed_up["decode"]["ours"][1] < 2.54
    (moved,) = [row for row in rows if "rearrangements" in row["what"]]
    assert moved["inside"] and moved["verdict"] == "not worth it"
    unpredicted = [row for row in rows if row["ours"] is None]
    assert len(unpredicted) == len(bench.main.UNPREDICTED) and all(row["not_known"] for row in unpredicted)
