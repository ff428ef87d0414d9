"""bench_cuda on a CPU, its own double: what differs is collected and all other rows come; its order; its rows, with
clocks that do not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import isoload
from support.recorded_calls import recorded

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_cuda
from lib import gpu_balancers, gpu_check
from lib.gpu_balancers import BALANCERS
from lib.gpu_jobs import JOBS, Job
from lib.gpu_layers import LAYERS, make_layers
from lib.gpu_worker import in_this_process
from lib.harness import ResultFile, Timing, read_results

SIZE = (16, 32, 50)


@pytest.mark.parametrize("ranks", [16, 64])
def test_balancers_give_the_chains_slots(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isoload, "CapturedBalancer", partial(isoload.CapturedBalancer, capture=recorded))
    (layer,) = make_layers(ranks, 64, 50, seed=1, layers=1)
    for job in BALANCERS:
        assert gpu_check.compare(job, [layer], [layer])[1] == ""
    assert gpu_check.compare(wrong(BALANCERS[0]), [layer], [layer])[1].startswith(
        "layer 0, output 0: 1 of 400"
    )


def wrong(job: Job) -> Job:
    """One number too high, on the device alone."""

    def call(layer: Any) -> Any:
        results = [result.clone() for result in gpu_check.outputs(job.call(layer))]
        results[0].view(-1)[0] += 1
        return results

    return replace(job, prepare=lambda layer: partial(call, layer))


def with_a_wrong(name: str, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    return tuple(wrong(job) if job.name == name else job for job in jobs)


def test_one_wrong_op_leaves_all_other_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = in_this_process(partial(gpu_check.check_one, "cpu", 0, ""))
    assert gpu_check.check_all(attempt, "cpu", [SIZE])
    right = capsys.readouterr().out.splitlines()
    assert len(right) == len(JOBS) + 1  # the Balancer's; none is captured here
    monkeypatch.setattr(gpu_check, "JOBS", with_a_wrong("plan_lp", JOBS))
    assert not gpu_check.check_all(attempt, "cpu", [SIZE])
    lines = capsys.readouterr().out.splitlines()
    (at,) = (n for n, line in enumerate(right) if "plan_lp" in line)
    assert lines[at] == "R=16 E=256+32 T=50 plan_lp: WRONG"
    assert [*lines[:at], *lines[at + 1 : len(right)]] == [*right[:at], *right[at + 1 :]]
    table = " ".join(lines[len(right) :])
    assert "plan_lp" in table and table.count("layer 0, output 0: 1 of ") == 2  # with ISOLOAD_PDL=0 as well


def test_a_job_that_raises_leaves_all_other_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    jobs = tuple(replace(job, prepare=refused) if job.name == "count" else job for job in JOBS)
    monkeypatch.setattr(gpu_check, "JOBS", jobs)
    assert not gpu_check.check_all(in_this_process(partial(gpu_check.check_one, "cpu", 0, "")), "cpu", [SIZE])
    found = capsys.readouterr().out
    assert (
        found.count(": WRONG") == 1 and found.count("an illegal memory access") == 2 and "more" not in found
    )
    assert found.count("\nR=16 ") == len(JOBS)


@pytest.mark.parametrize(
    ("early", "late", "said"),
    [("layer 3", "", "right"), ("layer 3", "layer 5", "layer 5"), ("layer 3", None, "it raises")],
)
def test_what_is_wrong_is_tried_without_early_starts(early: str, late: str | None, said: str) -> None:
    def attempt(name: str, starts_early: bool) -> tuple[Any, str]:
        answer = early if starts_early else late
        return ({"wrong": answer}, "") if answer is not None else (None, "it raises")

    assert gpu_check.tried(attempt, "route") == {"wrong": "layer 3", "one_after_another": said}


def test_the_second_time_no_kernel_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    see = lambda layer: seen.append(gpu_check.os.environ.get("ISOLOAD_PDL")) or torch.zeros(1)  # noqa: E731
    monkeypatch.setattr(gpu_check, "JOBS", (replace(JOBS[0], call=see),))
    for early in (True, False):
        gpu_check.check_one("cpu", 0, "", SIZE, JOBS[0].name, early)
    assert seen == [None, None, "0", "0"]


def test_differences() -> None:
    a = torch.tensor([0.0, 2.0, 3.0])
    assert gpu_check.difference([a], [a.clone()]) == ""
    assert gpu_check.difference([a], [a[:2]]) == "output 0 is torch.float32 [2], not torch.float32 [3]"
    assert gpu_check.difference([a, a], [a, a + 1]) == "output 1: 3 of 3, first [0] = 1.0, not 0.0"
    assert gpu_check.difference([a], [-a.neg().neg() * torch.tensor([1, -1, -1])]) == (
        "output 0: 1 of 3, first [0] = -0.0, not 0.0"
    )


def test_nothing_is_captured_without_the_caching_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch raises there: memcheck would end at the first size."""
    names = [job.name for job in gpu_check.checked("cuda")]
    assert names[-2:] == ["balancer", "balancer, captured"]
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert [job.name for job in gpu_check.checked("cuda")] == names[:-1]


def test_the_order_of_a_bench() -> None:
    """What a batch costs at all sizes before any single op; what moves most memory last, and of two layers."""
    order = bench_cuda.order(bench_cuda.SIZES)
    assert len(set(order)) == len(order) > 100
    names = [name for _, name in order]
    headline = names[: names.index(bench_cuda.FLOOR, 1)]
    assert headline[1:6] == [
        *("chain", "chain, one after another", "share, own row", "balancer", "balancer, captured"),
    ]
    assert headline == [name for _, name in bench_cuda.order(bench_cuda.SIZES[:1], headline_only=True)]
    last_of_headlines = max(n for n, name in enumerate(names) if name in bench_cuda.HEADLINE)
    assert {size for size, _ in order[: last_of_headlines + 1]} == set(bench_cuda.SIZES)
    assert not set(names[last_of_headlines + 1 :]) & set(bench_cuda.HEADLINE)
    pack = "number_rows and pack_rows"
    assert bench_cuda.BENCHED[pack].layers == 2 and LAYERS > 2
    at_first_size = [name for size, name in order if size == bench_cuda.SIZES[0]]
    assert at_first_size[-2:] == [pack, bench_cuda.AT_ONCE]
    assert (bench_cuda.SIZES[1], "plan_exact") not in order and (bench_cuda.SIZES[2], "plan_exact") in order


class Calls:
    """In the place of a graph."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for call in self.calls:
            call()

    def num_nodes(self) -> int:
        return 7


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which clocks were read, and over how many calls; none of them runs."""
    ran: list[tuple[str, int]] = []

    def clock(name: str) -> Callable[..., Timing]:
        def read(calls: Any, *_: object) -> Timing:
            calls = calls if isinstance(calls, list) else [calls]
            for call in calls:
                call()
            ran.append((name, len(calls)))
            return Timing(1.0, 2.0)

        return read

    for name in ("between_events", "behind_others", "from_python"):
        monkeypatch.setattr(bench_cuda, name, clock(name))
    monkeypatch.setattr(bench_cuda, "Graph", Calls)
    monkeypatch.setattr(isoload, "CapturedBalancer", partial(isoload.CapturedBalancer, capture=recorded))
    monkeypatch.setattr(bench_cuda.Bench, "roof", lambda self, _bytes, _count: 3.0)
    monkeypatch.setattr(gpu_balancers.Layer, "to", lambda layer, _device: layer)
    return ran


def test_rows_of_both_balancers(clocks: list[tuple[str, int]]) -> None:
    bench = bench_cuda.Bench(make_layers(*SIZE, seed=1, layers=2), 5)
    (eager,), (captured,) = bench.run("balancer"), bench.run("balancer, captured")
    assert "in_graph_us" in eager and "in_graph_us" not in captured
    assert eager["bytes"] == captured["bytes"] > 2 * 50 * 8 * 8 + 4 * 16 * 256
    of_calls = [("between_events", 1), ("behind_others", 1), ("from_python", 2)]
    assert clocks == [("between_events", 1), *of_calls, *of_calls]


def test_heavy_jobs_take_two_layers(clocks: list[tuple[str, int]]) -> None:
    bench = bench_cuda.Bench(make_layers(*SIZE, seed=1, layers=3), 5)
    (row,) = bench.run("number_rows and pack_rows")
    assert clocks[-1] == ("from_python", 2)
    assert row["bytes"] > 2 * 50 * 7168  # read, and written to every rank


def test_a_wrong_row_is_timed_and_says_so(
    clocks: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["count", "route", "chain"]
    jobs = with_a_wrong("route", tuple(job for job in JOBS if job.name in names))
    monkeypatch.setattr(bench_cuda, "BENCHED", {job.name: job for job in jobs})
    monkeypatch.setattr(bench_cuda, "order", lambda *_: [(SIZE, name) for name in names])
    monkeypatch.setattr(bench_cuda, "SIZES", [SIZE])
    monkeypatch.setattr(bench_cuda, "make_layers", partial(make_layers, layers=2))
    attempt = in_this_process(partial(bench_cuda.time_one, 5, 0))
    assert not bench_cuda.measure(attempt, ResultFile("rows", folder=tmp_path), True)
    rows = {row["op"]: row for row in read_results("rows", tmp_path)}
    assert list(rows) == names and all(row["in_graph_us"] == 1.0 for row in rows.values())
    assert {name for name, row in rows.items() if "wrong" in row} == {"route"}
    for told in ("wrong", "one_after_another"):
        assert rows["route"][told].startswith("layer 0, output 0: 1 of 400")
    found = capsys.readouterr().out
    assert "route WRONG" in found and "chain WRONG" not in found and "with ISOLOAD_PDL=0" in found


def test_rows_of_a_job_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no times; those behind it do."""
    monkeypatch.setattr(bench_cuda, "order", lambda *_: [(bench_cuda.SIZES[0], name) for name in ("a", "b")])
    right = {"rows": [{"op": "b", "alone_us": 1.0, "wrong": ""}], "wrong": ""}

    def attempt(_size: Any, name: str, _early: bool) -> tuple[Any, str]:
        return (None, "CUDA error") if name == "a" else (right, "")

    assert not bench_cuda.measure(attempt, ResultFile("rows", folder=tmp_path), False)
    a, b = read_results("rows", tmp_path)
    assert (a["op"], a["wrong"], "alone_us" in a) == ("a", "CUDA error", False)
    assert (b["op"], b["alone_us"], "wrong" in b) == ("b", 1.0, False)
