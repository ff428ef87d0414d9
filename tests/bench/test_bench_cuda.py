"""bench_cuda's Balancers on a CPU: the chain's slots, or an error; and rows for both, with clocks that do not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import isoload
from support.recorded_calls import recorded

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_cuda
import gpu_balancers
from gpu_layers import make_layers
from harness import ResultFile, Timing


@pytest.mark.parametrize("ranks", [16, 64])
def test_balancers_give_the_chains_slots(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isoload, "CapturedBalancer", partial(isoload.CapturedBalancer, capture=recorded))
    (layer,) = make_layers(ranks, 64, 50, seed=1, layers=1)
    for make in (gpu_balancers.make_balancer, gpu_balancers.make_captured):
        balancer = make(layer)
        slots = gpu_balancers.check_balancer(layer, layer, balancer)
        assert torch.equal(slots, balancer(layer.ids))


def test_other_slots_are_found() -> None:
    (layer,) = make_layers(16, 32, 50, seed=1, layers=1)
    with pytest.raises(SystemExit, match="differs from the chain"):
        gpu_balancers.check_balancer(layer, layer, lambda ids: ids)


class Calls:
    """In the place of a graph."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for call in self.calls:
            call()

    def num_nodes(self) -> int:
        return 7


def test_rows_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def clock(name: str) -> Callable[..., Timing]:
        def read(calls: Any, *_: object) -> Timing:
            for call in calls if isinstance(calls, list) else [calls]:
                call()
            ran.append(name)
            return Timing(1.0, 2.0)

        return read

    for name in ("between_events", "behind_others", "from_python"):
        monkeypatch.setattr(bench_cuda, name, clock(name))
    monkeypatch.setattr(bench_cuda, "Graph", Calls)
    monkeypatch.setattr(bench_cuda, "LAYERS", 2)
    monkeypatch.setattr(isoload, "CapturedBalancer", partial(isoload.CapturedBalancer, capture=recorded))
    monkeypatch.setattr(bench_cuda.Bench, "__post_init__", lambda self: setattr(self, "there", self.layers))
    monkeypatch.setattr(bench_cuda.Bench, "roof", lambda self, _bytes: 3.0)
    layers = make_layers(16, 32, 50, seed=1, layers=2)
    bench = bench_cuda.Bench(layers, 5, {"ranks": 16}, ResultFile("rows", folder=tmp_path))
    bench.balancers()
    eager, captured = bench.rows
    assert (eager["op"], captured["op"]) == ("balancer", "balancer, captured")
    assert "in_graph_us" in eager and "in_graph_us" not in captured
    assert eager["bytes"] == captured["bytes"] > 2 * 50 * 8 * 8 + 4 * 16 * 256
    of_calls = ["between_events", "behind_others", "from_python"]
    assert ran == ["between_events", *of_calls, *of_calls]
    bench_cuda.show(bench.rows, "title")
    assert "balancer, captured" in capsys.readouterr().out
