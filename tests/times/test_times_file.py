"""Times files: what is written is read back, and a file of anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isoload.times import AllToAllTime, ExpertTime, Times, load
from isoload.times.exchanges import Curve


def step(name: str, ranks: int = 4) -> AllToAllTime:
    curve = Curve(30.0, 0.1, 1.5)
    return AllToAllTime("GPU", "isoload", name, ranks, 1, curve, curve, 4096.0, 0.02, source="given")


def times(**changes: Any) -> Times:
    experts = ExpertTime(
        "GPU", "isoload", "bfloat16", 64, 32, 5.0, 2.0, 0.1, 0.01, 2.0, copies_from=1, copies_to=100
    )
    parts: dict[str, Any] = {
        "device": "GPU",
        "software": {"torch": "2.13"},
        "ranks": 4,
        "nodes": 1,
        "experts": experts,
        "dispatch": step("dispatch"),
        "combine": step("combine"),
        "move_us": 12.0,
        "plan_us": {"exact": 30.0, "own": 20.0},
        "speeds": (1.0, 1.0, 1.1, 1.0),
        "points": {"experts": [[1.0, 2.0]], "exchange": []},
    }
    return Times(**parts | changes)


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(times().to_json() | changes))
    return path


def test_a_file_is_read_back(tmp_path: Path) -> None:
    for ours in (times(), times(dispatch=None, combine=None, move_us=None, ranks=1, speeds=(1.0,))):
        path = tmp_path / "times.json"
        path.write_text(json.dumps(ours.to_json()))
        again = load(path)
        assert again.to_json() == ours.to_json() and again.source == str(path)
        assert again.experts.seconds([3, 4]) == ours.experts.seconds([3, 4])


def test_a_group_of_another_size_is_extrapolated_on_one_node_and_refused_on_more() -> None:
    layer, notes = times().layer(4, 1, 8)
    assert notes == [] and layer.dispatch is not None and layer.dispatch.measured
    wider, notes = times().layer(6, 1, 8)
    assert notes == ["the all-to-all of 6 ranks is extrapolated; measured were 4 ranks"]
    assert wider.dispatch is not None and wider.dispatch.seconds(1000)[1] > layer.dispatch.seconds(1000)[1]
    assert times().layer(1, 1, 8)[0].dispatch is None
    with pytest.raises(
        ValueError, match="measured on 4 ranks and 1 nodes, which says nothing about 16 ranks and 2"
    ):
        times().layer(16, 2, 8)
    with pytest.raises(ValueError, match=r"no times of dispatch and combine: .* torchrun --nproc-per-node 8"):
        times(dispatch=None, combine=None).layer(8, 1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "isoload placement"}, "is not a times file: isoload measure writes a new one"),
        ({"version": 2}, "has version 2, and this isoload reads version 1: isoload measure writes a new one"),
        ({"unit": "ms"}, "must be in microseconds, got 'ms': isoload measure writes a new one"),
        ({"more": 1}, "keys must be .*, got 'more' besides"),
        ({"ranks": 0}, "ranks must be a whole number from 1 on, got 0"),
        ({"move_us": -1}, "move_us must be a number from 0 on, got -1"),
        ({"plan_us": {"exakt": 1.0}}, "plan_us must have keys of exact, own, node, got 'exakt'"),
        ({"plan_us": {"exact": 1.0}}, "plan_us must have exact and own, got no own"),
        (
            {"exchange": {"kernel": "x", "dispatch": [0, 2, 1, 9, 0], "combine": [1, 2, 1, 9, 0]}},
            "exchange.dispatch must have a positive call and power, got 0 and 1",
        ),
        ({"speeds": [1.0]}, "speeds must be 4 positive numbers, one for each rank, got 1"),
        ({"exchange": {"kernel": "x", "dispatch": [1, 2, 3, 4, 5]}}, "keys of exchange must have combine"),
        ({"exchange": {"kernel": "x", "dispatch": [1, 2], "combine": [1, 2]}}, "not enough values"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "times.json", **changes)
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_missing_files_and_constants_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"times file .*none\.json cannot be read: "):
        load(tmp_path / "none.json")
    content = times().to_json()
    del content["experts"]["a_us"]
    with pytest.raises(ValueError, match="constants of experts must have a_us"):
        load(written(tmp_path / "times.json", experts=content["experts"]))
    content["experts"]["a_us"] = -1
    with pytest.raises(ValueError, match="a_us must be finite numbers from 0 on, got -1"):
        load(written(tmp_path / "times.json", experts=content["experts"]))
