"""Times files: what is written is read back, and a file of anything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isoload.times import load
from support.measured_times import times, written


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
        ValueError, match="measured on 4 ranks and 1 nodes, from which times of 16 ranks and 2"
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
        ({"more": 1}, "keys must be .*, got also 'more'"),
        ({"ranks": 0}, "ranks must be a whole number from 1 on, got 0"),
        ({"move_us": -1}, "move_us must be a number from 0 on, got -1"),
        ({"plan_us": {"exakt": 1.0}}, "plan_us must have keys of exact, own, node, got 'exakt'"),
        ({"plan_us": {"exact": 1.0}}, "plan_us must have exact and own, got no own"),
        (
            {"exchange": {"kernel": "x", "dispatch": [0, 2, 1, 9, 0], "combine": [1, 2, 1, 9, 0]}},
            "exchange.dispatch must have a positive call and power, got 0 and 1",
        ),
        ({"speeds": [1.0]}, "speeds must be 4 positive numbers, one for each rank, got 1"),
        ({"gpus": ["a", "b", "a", "c"]}, "gpus must be 4 different UUIDs, one for each rank, got"),
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


def test_a_borrow_pays_from_the_copies_of_a_move() -> None:
    """A move takes 12 us, a copy 0.11."""
    assert times().break_even == 110 and times(move_us=None).break_even is None


def test_moves_in_time_by_hand() -> None:
    """10 copies over 3 experts: 5 us for the call, 6.26 for reading and multiplying, 0.1 for rows; a move takes 0.5."""
    ours = times(move_us=0.5)
    assert ours.moves_in_time(10, 3) == int(1e6 * ours.experts.seconds([4, 3, 3]) / 0.5) > 0
    assert ours.moves_in_time(10, 20) > ours.moves_in_time(10, 3), "weights of the experts that have copies"
    assert times(move_us=1e9).moves_in_time(1, 1) == 0
    for arguments, name in (((0, 3), "copies"), ((3, 0), "slots"), ((1.5, 3), "copies")):
        with pytest.raises(ValueError, match=f"{name} must be a number of at least 1, got"):
            ours.moves_in_time(*arguments)
    with pytest.raises(
        ValueError, match="no time of moving an expert's weights: run isoload measure on at least two"
    ):
        times(move_us=None).moves_in_time(10, 3)
