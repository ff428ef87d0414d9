"""bench_dispatch at small size: every line is there, its copies and its result are right, and alike over processes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.processes import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_dispatch
import isoload
from isoload.transport import LocalTransport
from isoload.transport.deep_ep import transport as deep_ep_transport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU
from lib import dispatch_routing
from lib.dispatch_setting import LINES, SHAPES, Line, Setting, Shape, make_placement, policy_of
from lib.dispatch_stages import STAGES, LayerBench, StageClock, check
from lib.harness import gpu_links
from support.deep_ep_transports import BUFFERS

CPU = torch.device("cpu")
TINY = Setting(
    shape=Shape("tiny", 16, 16, 16, 4, 1), phase="decode", ranks=2, ranks_per_node=1, dtype=torch.float32
)
TIMED = ("ms", "weights_gb_per_s", "error")


def rows_on(kind: str, setting: Setting = TINY) -> list[dict[str, Any]]:
    on = bench_dispatch.Machine(kind, CPU)
    return list(bench_dispatch.bench_setting(setting, on, list(LINES), [], 1, 1))


@cache
def virtual_rows() -> list[dict[str, Any]]:
    return rows_on("local")


def rows_of_rank(rank: int) -> list[dict[str, Any]]:
    return rows_on("collective")


def rows_over_deep_ep(rank: int, expert_major: bool) -> list[dict[str, Any]]:
    deep_ep_transport.load_buffer = lambda name: BUFFERS[name or "EPBuffer"]
    wide = replace(TINY, shape=replace(TINY.shape, hidden=256), dtype=torch.bfloat16)
    on = bench_dispatch.Machine("deep_ep", CPU, "deep_ep", expert_major)
    found = list(bench_dispatch.bench_setting(wide, on, ["none", "exact", "joint", "hedge"], [], 1, 1))
    narrow = list(bench_dispatch.bench_setting(TINY, on, ["none"], [], 1, 1))
    return found + narrow


@pytest.mark.slow
@pytest.mark.parametrize("expert_major", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_over_a_double_of_deep_ep(expert_major: bool) -> None:
    virtual = {row["policy"]: row for row in virtual_rows()[1:]}
    for rows in run_ranks(rows_over_deep_ep, 2, expert_major):
        assert [row["policy"] for row in rows] == ["none", "none", "exact", "joint", "hedge", "none", "none"]
        for row in rows[1:5]:
            assert row["busiest_over_ideal"] == virtual[row["policy"]]["busiest_over_ideal"]
        assert rows[4]["borrow"] == "deep_ep" and rows[4]["weights_gb_per_s"] > 0
        assert all("hidden must be a multiple of 256" in row["not_run"] for row in rows[5:])


def layer_of(setting: Setting, line: Line) -> tuple[LayerBench, dispatch_routing.Routing]:
    on, routing = bench_dispatch.Machine("local", CPU), dispatch_routing.made(setting, 1)
    placement = make_placement(setting, line.room, routing.seen)
    bench = LayerBench(setting, placement, LocalTransport(setting.topology), CPU, on.timer)
    bench.layer.policy = policy_of(line, setting)
    return bench, routing


def test_every_line_counts_all_copies_alike_over_processes_and_virtual_ranks() -> None:
    virtual = virtual_rows()
    assert [row["policy"] for row in virtual] == ["none", *LINES]
    assert [row["routing"] for row in virtual] == ["even", *["made"] * len(LINES)]
    for row in virtual:
        assert row["copies"] == 2 * 128 * (4 + 1) and row["busiest_over_ideal"] >= 1
        stages = set(STAGES) - (set() if row["spare_slots"] else {"weights"})
        stages -= {"gather", "plan"} if row["policy"] == "none" else set()
        assert row["ms"].keys() == stages | {"experts in turn", "whole"}, row["policy"]
    by_name = {row["policy"]: row for row in virtual[1:]}
    assert virtual[0]["busiest_over_ideal"] == 1
    assert by_name["joint"]["busiest_over_ideal"] == 1 < by_name["none"]["busiest_over_ideal"]
    assert by_name["hedge"]["imports"] > 0
    backends = {"pull": "all_to_all", None: None}  # gloo reads no other process's memory
    for of_rank in run_ranks(rows_of_rank, 2):
        for row, other in zip(of_rank, virtual, strict=True):
            wanted = {k: v for k, v in other.items() if k not in TIMED} | {
                "borrow": backends[other["borrow"]]
            }
            assert {k: v for k, v in row.items() if k not in TIMED} == wanted
            assert row["ms"].keys() == other["ms"].keys()
            assert (row["weights_gb_per_s"] is None) == (row["imports"] == 0)


@pytest.mark.parametrize("name", ["none", "exact", "joint", "spill_cost", "hedge", "grace"])
def test_the_result_is_that_of_the_dense_layer(name: str) -> None:
    setting = replace(TINY, ranks=4, ranks_per_node=2)
    bench, routing = layer_of(setting, LINES[name])
    ids = [rows.clone() for rows in routing.batches[0]]
    ids[1][3:5, 1], ids[2][0] = -1, -1  # absent copies, and a token without any
    batch = bench.make_batch(ids)
    sample = bench.run(batch)
    outputs = bench.layer.compute(batch.rows, batch.ids, batch.weights)
    scaled = bench.one.down * bench.factors.view(-1, 1, 1)
    dense = ExpertWeights(bench.one.gate_up.expand(17, -1, -1).contiguous(), scaled)
    for rows, chosen, weights, output in zip(batch.rows, ids, batch.weights, outputs, strict=True):
        shared = torch.where((chosen >= 0).any(1, keepdim=True), 16, -1)
        slots = torch.cat([chosen, shared], 1)
        gates = torch.cat([weights, torch.ones(len(rows), 1)], 1).masked_fill(slots < 0, 0)
        torch.testing.assert_close(output, run_experts(rows, slots, gates, [dense], SwiGLU()))
    copies = sum(int(own.sum()) for own in sample.copies)
    assert copies == batch.num_copies == 4 * 128 * 5 - 2 - 5
    assert sample.error < 1e-5


def test_the_clock_changes_nothing_and_leaves_nothing() -> None:
    bench, routing = layer_of(TINY, LINES["hedge"])
    batch, layer = bench.make_batch(routing.batches[0]), bench.layer
    given = batch.rows, batch.ids, batch.weights
    with torch.no_grad():
        alone = layer.compute(*given)
        before = layer.dispatcher.dispatch, isoload.policies.Policy.plan, layer.borrowing.borrow
        with StageClock(layer, bench.timer, bench.meet) as clock:
            timed = layer.compute(*given)
    assert all(map(torch.equal, alone, timed))
    assert clock.ms.keys() == set(STAGES)
    assert before == (
        layer.dispatcher.dispatch,
        isoload.policies.Policy.plan,
        layer.borrowing.borrow,
    )


def test_an_expert_with_the_weights_of_another_is_found() -> None:
    bench, routing = layer_of(TINY, LINES["exact"])
    batch = bench.make_batch(routing.batches[0])
    assert bench.run(batch).error < 1e-5
    rank = bench.layer.weights[1]
    held = bench.factors[list(rank.layout.homes)].tolist()
    other = next(row for row, factor in enumerate(held) if factor != held[0])
    with torch.no_grad():
        rank.down[[0, other]] = rank.down[[other, 0]].clone()
    bench.layer.refresh_replicas()
    error = bench.run(batch).error
    with pytest.raises(RuntimeError, match="it must give the dense layer's result, got one that is off by"):
        check(TINY, torch.tensor([5]), None, 5, error, "it")


@pytest.mark.parametrize(
    ("copies", "quota", "error", "message"),
    [
        ([2, 2], None, 0.0, "it must compute all 5 copies, got 4"),
        ([2, 3], [3, 2], 0.0, "it must send every slot its quota, got others"),
        ([2, 3], [2, 3], float("nan"), "it must give the dense layer's result, got one that is off by nan"),
    ],
)
def test_what_is_wrong_ends_the_bench(copies: Any, quota: Any, error: float, message: str) -> None:
    planned = None if quota is None else torch.tensor(quota)
    with pytest.raises(RuntimeError, match=message):
        check(TINY, torch.tensor(copies), planned, 5, error, "it")


def test_a_line_that_cannot_run_says_why() -> None:
    on = bench_dispatch.Machine("local", CPU)
    plain = replace(TINY, shape=replace(TINY.shape, shared=0))
    rows = list(bench_dispatch.bench_setting(plain, on, ["joint", "exact"], [], 1, 1))
    assert [(row["policy"], row.get("not_run")) for row in rows[1:]] == [
        ("joint", "tiny has no shared expert"),
        ("exact", None),
    ]
    alone = replace(TINY, ranks=1)
    rows = list(bench_dispatch.bench_setting(alone, on, ["none", "llep"], [], 1, 1))
    assert rows[1]["not_run"] == "one rank has nothing to balance" and "not_run" not in rows[2]
    short = isoload.traces.Trace("short", 16, topk_ids=np.tile(np.arange(4, dtype=np.int32), (300, 1, 1)))
    rows = list(bench_dispatch.bench_setting(TINY, on, ["none"], [short], 1, 1))
    assert rows[1]["not_run"] == "trace short must have at least 2 batches of 256 tokens, got 1"
    counts = isoload.traces.Trace("counts", 16, 4, counts=np.full((2, 1, 16), 64))
    rows = list(bench_dispatch.bench_setting(TINY, on, ["grace"], [counts], 1, 1))
    assert "counts must be traces with per-token choices" in rows[1]["not_run"]
    assert "not_run" not in rows[2]


def test_recorded_routing_is_later_than_what_placements_see() -> None:
    trace = isoload.read_trace(dispatch_routing.SHIPPED)
    setting = replace(TINY, shape=SHAPES["gpt-oss-20b"], ranks=8, ranks_per_node=8)
    routing = dispatch_routing.recorded(setting, 2, trace)
    layer = dispatch_routing.median_layer(trace.batch_counts(), 8)
    assert routing.name == f"gptoss20b_decode, layer {layer}" and trace.topk_ids is not None
    recorded = torch.from_numpy(trace.topk_ids[:, layer])
    assert isinstance(routing.seen, isoload.traces.Trace) and routing.seen.topk_ids is not None
    assert np.array_equal(routing.seen.topk_ids[:, 0], recorded[: 3 * 1024])  # of 7 batches
    for ids, first in zip(routing.batches, (3 * 1024, 5 * 1024), strict=True):
        assert [len(rows) for rows in ids] == [128] * 8
        told = torch.cat(ids).sort(0).values
        assert torch.equal(told, recorded[first : first + 1024].long().sort(0).values)


def test_the_median_layer() -> None:
    counts = np.array([[[6, 0, 0, 0], [3, 0, 2, 1], [2, 1, 1, 2]]])
    assert dispatch_routing.median_layer(counts, 4) == 1
    assert dispatch_routing.median_layer(counts, 2) == 2  # 6, 3, 3


def test_the_script_writes_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--scale 128 --shapes gpt-oss-20b --phases decode --policies none exact waterfill --rounds 1 --batches 1"
    monkeypatch.setattr(sys, "argv", ["bench_dispatch.py", *given.split(), "--results", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_dispatch.main()
    rows = [
        json.loads(line) for line in (tmp_path / "bench_dispatch_cpu_local.jsonl").read_text().splitlines()
    ]
    assert [row["policy"] for row in rows] == ["none", *["waterfill", "none", "exact"] * 2]
    assert all(row["backend"] == "local" and row["commit"] and row["ranks"] == 8 for row in rows)
    shown = capsys.readouterr().out
    assert "waterfill: not run, gpt-oss-20b has no shared expert" in shown
    assert "gpt-oss-20b, decode, made: 8 ranks, 128 tokens each" in shown


@pytest.mark.parametrize("option", ["--scale", "--rounds", "--batches", "--ranks", "--ranks-per-node"])
def test_numbers_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_dispatch.arguments().parse_args([option, "0"])
    assert f"{option}: must be a whole number of at least 1, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--transport", "deep_ep"], "--transport deep_ep needs torchrun"),
        (["--expert-major"], "--expert-major needs --transport deep_ep"),
    ],
)
def test_options_that_do_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_dispatch.py", *given])
    with pytest.raises(SystemExit):
        bench_dispatch.main()
    assert message in capsys.readouterr().err


def test_nodes_that_do_not_divide_the_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["--ranks", "8", "--ranks-per-node", "3", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_dispatch.py", *given])
    with pytest.raises(ValueError, match="ranks_per_node must divide"):
        bench_dispatch.main()


def test_links_of_a_machine() -> None:
    head = "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    rows = (
        "GPU0\t X \tNV18\tSYS\tPIX\t0-47\nGPU1\tNV18\t X \tSYS\tSYS\t0-47\nGPU2\tSYS\tSYS\t X \tPIX\t0-47\n"
    )
    assert (
        gpu_links(head + rows + "NIC0\tPIX\tSYS\tPIX\t X \n\nLegend:\n\n  X    = Self\n") == "NV18 x2, SYS x4"
    )
    assert gpu_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == "one GPU"
    assert gpu_links("") == "unknown"
