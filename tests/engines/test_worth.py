"""ISOLOAD_REBALANCE and ISOLOAD_TIMES: a new map is applied only if it pays."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.judge import ExpertSize
from isoload.engines.layers import EngineLayers
from isoload.engines.settings import Settings
from isoload.engines.tables import engine_topology, lay_out, placement_of
from isoload.engines.worth import NewMaps, RebalanceRule
from isoload.online.metrics import Metrics
from isoload.times import ExpertTime
from support import measured_times

R, E, S, L = 4, 16, 5, 3
SIZE = ExpertSize(400_000, 400_000)
LINEAR = ExpertTime("h100", "made", "", 0, 0, 0.0, 0.0, 2.0, 0.0, 1.0)  # 2 us a copy, nothing else


class Counted(Metrics):
    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0

    def add(self, name: str, value: float = 1.0, *labels: str) -> None:
        assert name == "rebalances_skipped_total"
        self.skipped += 1


def new_maps(rule: str, interval: int = 100, is_exact: bool = False, **changes: Any) -> NewMaps:
    given: dict[str, Any] = {"experts": LINEAR, "metrics": Counted()} | changes
    return NewMaps("engine", RebalanceRule.parse(rule), SIZE, interval, is_exact, **given)


def placed(counts: torch.Tensor, topology: isoload.Topology | None = None) -> isoload.Placement:
    return isoload.place(counts, topology or isoload.Topology(R), S, "eplb")


def drawn(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(L, E, generator=generator) ** 3 * 4000).long()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("gain_ms=0.3,move_ms=auto", RebalanceRule(0.3, None)),
        (" move_ms = 400 ", RebalanceRule(0.0, 400.0)),
        ("gain_ms=0", RebalanceRule()),
    ],
)
def test_rules(text: str, rule: RebalanceRule) -> None:
    assert Settings.read({"ISOLOAD_REBALANCE": text}).rebalance == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gain=0.3", "must be gain_ms=NUMBER,move_ms=NUMBER or move_ms=auto, got 'gain=0.3'"),
        ("gain_ms", "must be gain_ms=NUMBER,move_ms=NUMBER or move_ms=auto, got 'gain_ms'"),
        ("gain_ms=1,gain_ms=2", "must be gain_ms=NUMBER"),
        ("gain_ms=-1", "gain_ms must be a number of at least 0, got '-1'"),
        ("gain_ms=auto", "gain_ms must be a number of at least 0, got 'auto'"),
        ("move_ms=nan", "move_ms must be a number of at least 0, got 'nan'"),
    ],
)
def test_refused_rules(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^ISOLOAD_REBALANCE {message}"):
        Settings.read({"ISOLOAD_REBALANCE": text})


@pytest.mark.parametrize("is_exact", [False, True])
def test_the_saving_is_that_of_the_slowest_ranks(is_exact: bool) -> None:
    old, new, counts = placed(drawn(0)), placed(drawn(1)), drawn(1)
    worth = new_maps("gain_ms=0", is_exact=is_exact).worth(old, new, counts * 10, passes=10)
    wanted = 0.0
    for placement, sign in ((old, 1), (new, -1)):
        for layer in range(L):
            loads = counts[layer].int()
            plan = isoload.plan(loads, placement, layer, "exact" if is_exact else "even")
            assert plan.peak is not None
            wanted += sign * 2e-3 * int(plan.peak)
    assert worth.gain_ms == pytest.approx(wanted) and worth.gain_ms > 0


def test_the_move_takes_the_busiest_ranks_bytes_over_the_link() -> None:
    old, new = placed(drawn(0)), placed(drawn(1))
    slots = [p.slot_to_expert.view(L, R, S) for p in (old, new)]
    arriving = [
        sum(len(set(slots[1][i, r].tolist()) - set(slots[0][i, r].tolist())) for i in range(L))
        for r in range(R)
    ]
    worth = new_maps("gain_ms=0").worth(old, new, drawn(1), 1)
    assert worth.move_ms == pytest.approx(max(arriving) * 400_000 / 400e9 * 1e3)
    two_nodes = [placement_of(p.slot_to_expert, E, isoload.Topology(R, ranks_per_node=2)) for p in (old, new)]
    assert new_maps("gain_ms=0").worth(*two_nodes, drawn(1), 1).move_ms == pytest.approx(8 * worth.move_ms)
    assert new_maps("move_ms=7.5").worth(old, new, drawn(1), 1).move_ms == 7.5


def test_a_map_that_does_not_pay_is_skipped_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "isoload")
    old, new, counts = placed(drawn(0)), placed(drawn(1)), drawn(1)
    worth = new_maps("gain_ms=0").worth(old, new, counts, 1)
    dear = new_maps(f"move_ms={101 * worth.gain_ms}")
    assert dear.choose(old, new, counts, 1) is old and dear.choose(old, new, counts, 1) is old
    assert dear.metrics.skipped == 2 and caplog.text.count("a rebalance was skipped (ISOLOAD_REBALANCE)") == 1
    assert f"save {worth.gain_ms:.3f} ms in a pass" in caplog.text
    assert new_maps(f"move_ms={99 * worth.gain_ms}").choose(old, new, counts, 1) is new
    assert new_maps(f"gain_ms={1.01 * worth.gain_ms},move_ms=0").choose(old, new, counts, 1) is old
    assert new_maps("move_ms=0").choose(old, old, counts, 1) is old
    idle = new_maps("move_ms=0")
    assert idle.choose(old, new, torch.zeros(L, E).long(), 1) is old and idle.metrics.skipped == 0


def test_lay_out_keeps_the_present_map() -> None:
    old, counts, topology = placed(drawn(0)), drawn(1), isoload.Topology(R)
    before = old.slot_to_expert.long()
    dear, cheap = new_maps("gain_ms=1e9"), new_maps("move_ms=0")
    kept = lay_out(counts, topology, S, "eplb", before, dear)
    assert torch.equal(kept.physical_to_logical, before) and dear.metrics.skipped == 1
    replaced = lay_out(counts, topology, S, "eplb", before, cheap)
    assert torch.equal(replaced.physical_to_logical, lay_out(counts, topology, S, "eplb", before)[0])
    # Without a present map the first one is always made, from batches too.
    assert lay_out(torch.stack([counts, counts]), topology, S, "eplb", None, dear, 2) is not None


def test_loads_above_a_plans_limit_are_scaled() -> None:
    old, new, counts = placed(drawn(0)), placed(drawn(1)), drawn(1)
    small, large = (new_maps("gain_ms=0").worth(old, new, counts * n, 1).gain_ms for n in (1000, 10**9))
    assert large > small > 0


def test_sizes_count_the_two_matrices() -> None:
    gate_up, down = torch.zeros(4, 8, 6, dtype=torch.bfloat16), torch.zeros(4, 6, 4, dtype=torch.bfloat16)
    assert ExpertSize.of([gate_up, down]) == (144, 72)
    scales = torch.zeros(4, 2, 1)
    packed = [torch.zeros(4, 8, 3, dtype=torch.uint8), scales, torch.zeros(4, 6, 2, dtype=torch.uint8)]
    assert ExpertSize.of(packed) == (24 + 8 + 12, 72)


class Layers(EngineLayers[Any]):
    engine = "engine"

    def engine_group(self) -> Any:
        raise AssertionError

    def engine_rank(self) -> int:
        return 0


def test_times_of_other_ranks_or_experts_are_refused(tmp_path: Path) -> None:
    path = measured_times.written(tmp_path / "times.json")
    assert engine_topology(4, 1, str(path)).speeds == (1.0, 1.0, 1.1, 1.0)
    with pytest.raises(
        ValueError, match="ISOLOAD_TIMES=.* has the speeds of 4 ranks but the engine has 8 expert"
    ):
        engine_topology(8, 1, str(path))
    even = measured_times.written(tmp_path / "even.json", speeds=[1.0, 1.0, 1.009, 1.0])
    assert engine_topology(4, 1, str(even)).speeds is None
    with pytest.raises(ValueError, match="^ISOLOAD_TIMES: .*cannot be read"):
        Settings.read({"ISOLOAD_TIMES": str(tmp_path / "none.json")})
    layers = Layers()
    layers.start(Settings.read({"ISOLOAD_TIMES": str(path), "ISOLOAD_REBALANCE": "gain_ms=0"}))
    weights = torch.zeros(4, 64, 64), torch.zeros(4, 32, 64)
    layers.decide({1: weights}, 50)
    assert layers.new_maps is not None and layers.new_maps.experts.kernel == "isoload"
    with pytest.raises(ValueError, match="is of experts of 6144 weights but the model's have 3072"):
        layers.decide({1: (torch.zeros(4, 64, 32), torch.zeros(4, 16, 64))}, 50)


def test_times_of_other_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = measured_times.written(tmp_path / "times.json", device="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    layers = Layers()
    layers.start(Settings.read({"ISOLOAD_TIMES": str(path)}))
    with pytest.raises(
        ValueError, match="was measured on NVIDIA H200 but this rank has NVIDIA H100: run isoload"
    ):
        layers.place(torch.zeros(1, 4).int(), 1, isoload.Topology(4), torch.device("cuda"))


def test_a_swapped_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = measured_times.written(tmp_path / "times.json", device="NVIDIA H100", gpus=["b", "a", "c", "d"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    layers = Layers()
    layers.start(Settings.read({"ISOLOAD_TIMES": str(path)}))
    with pytest.raises(
        ValueError, match="has GPU b as rank 0 but this rank has GPU a: run isoload measure on these"
    ):
        layers.place(torch.zeros(1, 4).int(), 1, isoload.Topology(4), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="b"))
    layers.place(torch.zeros(1, 4).int(), 1, isoload.Topology(4), torch.device("cuda"))


def test_a_slow_rank_counts_by_its_time() -> None:
    topology = isoload.Topology(R, speeds=(1.0, 0.5, 1.0, 1.0))
    counts = torch.full((1, 4), 100)
    placement = isoload.place(counts, topology, 1, "trivial")
    maps = new_maps("gain_ms=0")
    assert maps._pass_ms(placement, counts, 1) == pytest.approx(2e-3 * 200)
    assert np.isclose(maps._pass_ms(isoload.place(counts, R, 1, "trivial"), counts, 1), 2e-3 * 100)
