"""bench_stack at small size: every line is right, alike over processes, and its stages are those of a layer."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from support.processes import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_stack
import isoload
from isoload.layer import two_stage
from lib.dispatch_routing import Routing, made
from lib.dispatch_setting import Setting, Shape
from lib.stack_stages import LINES, STAGES, Line, StackBench, StackClock

CPU, LAYERS = torch.device("cpu"), 3
SHAPE = Shape("tiny", 16, 16, 16, 4)
TINY = Setting(shape=SHAPE, phase="decode", ranks=2, ranks_per_node=2, dtype=torch.float32)
ASKED = SimpleNamespace(
    shapes=["tiny"], phase="decode", scale=1, layers=LAYERS, slots=2, replicas=1, right=0.8, batches=2, rounds=1,
    grid=False,
)  # fmt: skip
TIMED = ("ms", "series_ms", "borrow")


def rows_on(local: bool) -> list[dict[str, Any]]:
    with patch.dict(bench_stack.SHAPES, {"tiny": SHAPE}):
        return list(bench_stack.bench(ASKED, 2, 2, CPU, local))


def rows_of_rank(rank: int) -> list[dict[str, Any]]:
    return rows_on(False)


@cache
def routing() -> Routing:
    return made(TINY, LAYERS)


def stack_of(line: Line, right: float = 0.8) -> tuple[StackBench, list[Any], list[Any]]:
    """A line, one batch of its layers, and what it is told of them."""
    placement = bench_stack.place(TINY, line, routing(), 2, 1)
    clock = lambda call: (call(), 1.0)  # noqa: E731
    bench = StackBench(TINY, line, placement, LAYERS, CPU, clock, True)
    batch = [part.make_batch(ids) for part, ids in zip(bench.parts, routing().batches, strict=True)]
    return bench, batch, bench_stack.forecasts(routing(), right)


@pytest.mark.slow
def test_every_line_is_alike_over_processes_and_virtual_ranks() -> None:
    virtual = rows_on(True)
    assert [row["line"] for row in virtual] == [line.name for line in LINES]
    for row in virtual:
        assert row["ms"].keys() == {*STAGES, "whole"}
        in_stack = row["order"] != "alone"
        assert {stage for stage in STAGES if row["ms"][stage] > 0} == set(STAGES) - (
            set() if in_stack else {"predict", "fetch", "local"}
        )
        assert len(row["series_ms"]) == len(row["series_imbalance"]) == ASKED.batches
    by_line = {row["line"]: row["series_imbalance"] for row in virtual}
    assert all(a > b for a, b in zip(by_line["alone: none"], by_line["planned: hedge"], strict=True))
    for of_rank in run_ranks(rows_of_rank, 2):
        for row, other in zip(of_rank, virtual, strict=True):
            facts = {name: value for name, value in other.items() if name not in TIMED}
            assert {name: value for name, value in row.items() if name not in TIMED} == facts
            assert row["borrow"] == {"pull": "all_to_all", None: None}[other["borrow"]]


@pytest.mark.parametrize("line", LINES[2:], ids=lambda line: line.name)
def test_stages_are_timed_once_each_and_nothing_is_left(line: Line) -> None:
    """A clock of one millisecond per call counts them, here of the last layer of the second batch."""
    bench, batch, guesses = stack_of(line)
    bench.run(batch, guesses, False)
    assert bench.told is not None
    bench.told.tell(guesses)
    before = two_stage.route, bench.group.gather_loads
    with torch.no_grad():
        for part, given in zip(bench.parts, batch, strict=True):
            with StackClock(part.layer, bench.timer, part.meet, stack=bench.stack) as clock:
                part.layer.compute(given.rows, given.ids, given.weights)
    assert before == (two_stage.route, bench.group.gather_loads)
    found = {stage: len(times) for stage, times in clock.ms.items()}
    held = line.order == "held"
    # count and gather; plan, and route of both ranks or of every source; rows begun and waited for, in held packed, too
    wanted = {"gather": 2, "predict": 1, "plan": 3 if held else 2, "fetch": 1, "local": 2, "remote": 2}
    wanted |= {"dispatch": 2 + (2 + 2 + 4 if held else 0), "combine": 1}
    assert found == wanted


def test_forecasts_are_right_in_part() -> None:
    assert all(
        torch.equal(guess, ids)
        for of, true in zip(bench_stack.forecasts(routing(), 1.0), routing().batches, strict=True)
        for guess, ids in zip(of, true, strict=True)
    )
    pairs = zip(bench_stack.forecasts(routing(), 0.8), routing().batches, strict=True)
    same = torch.cat([(g == t).flatten() for of, true in pairs for g, t in zip(of, true, strict=True)])
    assert 0.8 < float(same.double().mean()) < 0.9  # some of the drawn ones are right, too


def test_a_true_forecast_leaves_no_imbalance_beyond_the_slots() -> None:
    """Of the second batch, as the first layer of the first one has nothing fetched."""
    bench, batch, guesses = stack_of(Line("hedge", "planned"), 1.0)
    for _ in range(2):
        found = bench.run(batch, guesses, False)
    for layer in bench.layers:
        assert layer.last_plan is not None and layer.last_plan.peak == layer.last_plan.bound
    assert found["imbalance"] == pytest.approx(1, abs=1e-2)


def test_a_wrong_result_ends_the_bench() -> None:
    bench, batch, guesses = stack_of(Line("hedge", "held"))
    with torch.no_grad():
        bench.layers[1].weights[0].down.mul_(-1)
    with pytest.raises(RuntimeError, match="held: hedge of tiny must give the dense layer's result"):
        bench.run(batch, guesses, False)


def test_the_grid_has_every_batch_and_length(capsys: pytest.CaptureFixture[str]) -> None:
    """As many tokens are one setting, and its time stands wherever they come up."""
    asked = SimpleNamespace(**{**vars(ASKED), "grid": True, "phase": "prefill", "scale": 1024, "batches": 1})
    with (
        patch.dict(bench_stack.SHAPES, {"tiny": SHAPE}),
        patch.object(bench_stack, "LINES", LINES[:2]),
        patch.object(bench_stack, "SEQUENCES", (8, 16)),
        patch.object(bench_stack, "LENGTHS", (1024, 2048)),
    ):
        rows = list(bench_stack.bench(asked, 2, 2, CPU, True))
        bench_stack.show(rows)
    assert [(row["full_tokens"], row["tokens_per_rank"]) for row in rows[::2]] == [
        (4096, 4),
        (8192, 8),
        (16384, 16),
    ]
    grid = capsys.readouterr().out.rpartition("tiny, made; ms of a layer")[2]
    first = [
        [cell.strip() for cell in line.split("|")] for line in grid.splitlines() if "alone: none" in line
    ]
    assert [line[2] for line in first] == ["1024", "2048"] and first[0][4] == first[1][3]


def test_recorded_routing_of_the_shape_is_a_setting_of_its_own(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    choices = draw.random((2048, 1, 16)).argsort(-1)[..., :4].astype(np.int32)
    traces = [
        isoload.traces.Trace(name, 16, topk_ids=choices[:n]) for name, n in (("long", 2048), ("short", 256))
    ]
    with patch.dict(bench_stack.SHAPES, {"tiny": SHAPE}), patch.object(bench_stack, "LINES", LINES[2:3]):
        long, short, made_row = bench_stack.bench(ASKED, 2, 2, CPU, True, traces)
    assert long["routing"] == "long, layer 0" and len(long["series_ms"]) == 1
    assert "trace short must have at least 2 batches of 256 tokens, got 1" in short["not_run"]
    assert made_row["routing"] == "made"


def test_widths_follow_the_scale() -> None:
    glm = replace(TINY, shape=bench_stack.SHAPES["GLM-4.5"], scale=16, phase="prefill")
    assert (glm.hidden, glm.intermediate, glm.tokens) == (320, 96, 256)
