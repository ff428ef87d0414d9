"""The protocol of LLEP's paper in bench/: virtual ranks compute the layer, and what it counts is there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.processes import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_llep
import isoload
from isoload.weights.compute import run_experts
from isoload.weights.experts import SwiGLU
from lib import llep_tables
from lib.llep_processes import RankBench
from lib.llep_setting import POLICIES, SHAPES, Scale, Setting, Shape
from lib.llep_virtual import VirtualRanks, bench_cell, count_traffic, imports

CPU = torch.device("cpu")
TINY = Setting(
    shape=Shape("tiny", 16, 16, 16, 4, 24), scale=Scale(1, 1), share=0.95, num_hot=1, min_chunk=1, ranks=4
)
FORMS = pytest.mark.parametrize("repeat", [True, False], ids=["repeated", "distinct"])


@FORMS
@pytest.mark.parametrize("name", POLICIES)
def test_virtual_ranks_compute_the_layer(name: str, repeat: bool) -> None:
    setting = replace(TINY, repeat=repeat)
    ranks, ids = VirtualRanks(setting, CPU), setting.topk_ids(CPU)
    routed = ranks.route(setting, name, ids)
    result = torch.zeros_like(ranks.rows)
    for rank in range(setting.ranks):
        ranks.borrow(routed, rank)
        received = ranks.receive(routed, rank)
        tokens = (routed.slots // (ranks.size + ranks.spare_slots) == rank).any(1)
        assert torch.equal(received[0], ranks.rows[tokens])
        result[tokens] += ranks.compute(routed, rank, received)
    wanted = run_experts(ranks.rows, torch.cat(ids), ranks.weights, [ranks.dense], SwiGLU())
    torch.testing.assert_close(result, wanted)
    assert name != "LLEP" or imports(routed.plan) > 0


@FORMS
@pytest.mark.parametrize("name", ["EP", "LLEP"])
def test_traffic_is_what_loops_count(name: str, repeat: bool) -> None:
    setting = replace(TINY, repeat=repeat, num_hot=4)
    ranks, ids = VirtualRanks(setting, CPU), setting.topk_ids(CPU)
    found = count_traffic(ranks, setting, name, ids)
    stride, received, left = ranks.size + ranks.spare_slots, [0] * 4, 0
    copies = [0] * 4
    for token, slots in enumerate(ranks.route(setting, name, ids).slots.tolist()):
        for rank in {slot // stride for slot in slots}:
            received[rank] += 1
            left += rank != token // setting.tokens
        for slot in slots:
            copies[slot // stride] += 1
    assert (found["rows_left"], found["busiest_rows"]) == (left, max(received))
    assert found["peak_copies"] == max(copies)
    assert found["row_bytes"] == left * (2 * 16 * 4 + 4 * 8)
    assert (found["moved"] > 0) == (name == "LLEP") == (found["pool_bytes"] > 0)
    assert found["weight_bytes"] == found["moved"] * 3 * 16 * 16 * 4
    assert found["peak_bytes"] > max(received) * 16 * 4


def test_one_expert_of_distinct_ones_gets_at_most_a_kth() -> None:
    for repeat, most in ((True, 0.95), (False, 0.95 / 4)):
        ids = torch.cat(replace(TINY, repeat=repeat).topk_ids(CPU))
        assert (ids == 0).sum().item() / ids.numel() == pytest.approx(most, abs=0.01)


def traffic_of_rank(rank: int) -> tuple[dict[str, float], dict[str, int]]:
    torch.set_num_threads(1)
    bench = RankBench(TINY, CPU)
    sample = bench.run(TINY, "LLEP")
    return sample, dict(bench.transport.group.traffic.bytes)


def test_weights_travel_as_the_bench_says() -> None:
    found = run_ranks(traffic_of_rank, 4)
    for stage, key in (
        ("borrow", "borrow_weight_bytes"),
        ("borrow backward", "again_weight_bytes"),
        ("borrowed gradients", "returned_weight_bytes"),
    ):
        assert sum(sent[stage] for _, sent in found) == found[0][0][key] > 0, stage


def test_tables_show_every_kind_of_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = VirtualRanks(TINY, CPU)
    cell = bench_cell(ranks, TINY, tuple(POLICIES), 1)
    assert [row["policy"] for row in cell] == list(POLICIES)
    monkeypatch.setattr(bench_llep, "GROUPED", (1, 2))
    grouped = bench_llep.bench_grouped(Scale(2048, 512), CPU, 1)
    sweep = [{"kind": "sweep", "sweep": "alpha", "value": 1.0, **row} for row in cell]
    llep_tables.show([*({"kind": "layer", **row} for row in cell), *sweep, *grouped])
    shown = capsys.readouterr().out
    assert "tiny, distinct: 4 ranks, 24 tokens per rank" in shown
    assert "target 1.05" in shown and "equal FLOPs" in shown


def test_sweeps_have_at_least_four_points() -> None:
    points = list(bench_llep.sweeps(Setting(shape=SHAPES["gpt-oss-120b"], scale=Scale())))
    for sweep in {name for name, *_ in points}:
        assert len({value for name, value, _ in points if name == sweep}) >= 4


@pytest.mark.parametrize("name", SHAPES)
def test_the_busiest_rank_is_at_the_level_where_chunks_are_small_beside_it(name: str) -> None:
    """Every setting of the paper with at least 50 min_chunk per rank: what min_chunk leaves at home is below 2 %."""
    base = Setting(shape=SHAPES[name], scale=Scale())
    for setting in bench_llep.concentrations(base, (True, False)):
        loads = sum(isoload.count(ids, setting.shape.experts) for ids in setting.topk_ids(CPU))
        plan = isoload.plan(loads, setting.placement, 0, setting.policy("LLEP"))
        mean = int(loads.sum()) / setting.ranks
        assert mean >= 50 * setting.min_chunk / setting.scale.tokens
        imbalance = int(loads.view(setting.ranks, -1).sum(1).max()) / mean
        assert int(plan.peak) <= 1.02 * mean + 1 or imbalance <= setting.threshold, setting
