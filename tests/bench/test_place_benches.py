"""Rivals of bench_place and variants of bench_grace are what they are said to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import isoload
from isoload.analysis.judge import even_imbalance
from isoload.traces import Trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_grace as grace
from lib import flash_rival as flash

ROOT = Path(__file__).parents[2]


def test_the_flash_like_rival_is_whole_and_meets_the_published_example():
    counts = np.array([[[600, 560, 120, 120, 20, 10, 10, 10.0]]])
    slots = flash.flash_placement(counts, isoload.Topology(8), 2).arrays[0].reshape(8, 2)
    copies = np.bincount(slots.ravel())
    assert max(sum(counts[0, 0, e] / copies[e] for e in row) for row in slots) == pytest.approx(205)
    rng = np.random.default_rng(0)
    for ranks, size, experts in ((4, 5, 16), (6, 4, 24), (3, 6, 7)):
        counts = np.floor(100 * 3.0 ** rng.normal(size=(5, 2, experts)))
        placement = flash.flash_placement(counts, isoload.Topology(ranks), size)
        for layer in placement.arrays[0].reshape(2, ranks, size):
            assert set(layer.ravel().tolist()) == set(range(experts))
            assert all(len(set(row)) == size for row in layer.tolist())


def test_the_flash_like_rival_plans_for_the_window_and_not_its_sum():
    rng = np.random.default_rng(1)
    counts = np.floor(100 * 3.0 ** (rng.normal(size=(1, 4, 32)) + rng.normal(size=(6, 4, 32))))
    topology = isoload.Topology(8)
    flat, rival = isoload.place(counts, topology, 5), flash.flash_placement(counts, topology, 5)
    assert even_imbalance(rival, counts).mean() < 0.97 * even_imbalance(flat, counts).mean()


def test_variants_of_grace_hold_every_expert_and_differ_in_size():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    draw = np.random.default_rng(2)
    blocks = np.split(draw.permutation(16), [7, 9, 12])
    pools = [np.arange(16) if draw.random() < 0.1 else blocks[draw.integers(4)] for _ in range(600)]
    ids = np.stack([draw.choice(pool, 2, replace=False) for pool in pools])[:, None]
    trace = Trace("made", 16, topk_ids=ids.astype(np.int32), layer_ids=(3,))
    seen, judged = grace.halves(trace)
    assert len(seen.topk_ids) == len(judged.topk_ids) == 300
    rows = {row["variant"]: row for row in grace.bench(trace, 2, 2)}
    assert len(rows) == 14 and rows["affinity, equal"]["slots"] == rows["in order"]["slots"] == 16
    sizes = {
        variant.name: sorted((p.arrays[0].reshape(4, -1) >= 0).sum(1).tolist())
        for variant in grace.variants(seen, isoload.Topology(4, 2))
        for p in variant.make()
    }
    assert sizes["affinity, equal"] == sizes["random"] == [4, 4, 4, 4]
    assert sum(sizes["affinity, any size"]) == 16 and sizes["affinity, any size"] != [4, 4, 4, 4]
    for name in ("affinity, equal", "affinity, any size", "affinity, controlled"):
        assert rows[name]["rank_rows"] < rows["random"]["rank_rows"]
    assert rows["scenario, exact"]["imbalance"] < rows["affinity, controlled"]["imbalance"]
    assert rows["near, exact"]["node_dispatch_rows"] < rows["scenario, exact"]["node_dispatch_rows"]


def test_sequences_are_not_cut_into_seen_and_unseen():
    ids = np.tile(np.array([[[0, 1]]], dtype=np.int32), (10, 1, 1))
    for lengths, cut in (((3, 4, 3), 7), ((10,), 5), ((5, 5), 5)):
        seen, judged = grace.halves(
            Trace("t", 4, topk_ids=ids, seq_id=np.repeat(np.arange(len(lengths)), lengths))
        )
        assert (len(seen.topk_ids), len(judged.topk_ids)) == (cut, 10 - cut)


def test_what_is_said_of_rows_to_other_nodes():
    rows = [
        json.loads(line)
        for line in (ROOT / "bench" / "results" / "bench_grace.jsonl").read_text().splitlines()
    ]
    placement, dispatch = (
        " ".join((ROOT / "docs" / name).read_text().split())
        for name in ("results-placement.md", "your-own-loop.md")
    )

    def span(values):
        return f"{100 * min(values):.0f} to {100 * max(values):.0f} %"

    groups = [r for r in rows if r["ranks"] == 4 and r["variant"] == "affinity, controlled"]
    once, by_ranks = (
        span([-r[f"{name}_change"] for r in groups]) for name in ("node_dispatch_rows", "node_rows")
    )
    assert f"controlled groups {once} on 2 nodes of 2 ranks, where by ranks it is {by_ranks}" in placement
    level = [-r["node_dispatch_rows_change"] for r in rows if r["variant"] == "scenario, exact"]
    assert f"({100 * max(level):.0f} % less at most)" in placement
    assert all(r["met"] for r in rows if "met" in r)
    idle = {(r["trace"], r["ranks"], r["variant"]): r["idle_share"] for r in rows}
    names = ("fixed count, weights", "collaborative, weights", "one replica, weights", "+ replicas, weights")
    for trace, ranks in {key[:2] for key in idle}:
        hot, partners, fixed, by_skew = (idle[trace, ranks, name] for name in names)
        assert hot < partners and by_skew <= fixed + 0.001
    two, four = (
        span([1 - r["node_dispatch_rows"] / r["node_rows"] for r in rows if r["ranks"] == ranks])
        for ranks in (4, 8)
    )
    assert f"fall by {two} on 2 nodes of 2 ranks and by {four} on 2 of 4" in dispatch
