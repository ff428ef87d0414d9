"""Switch: what the file may contain, which choice it picks, and that all ranks turn after the same pass."""

from __future__ import annotations

import logging
import os
import re
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isoload.engines.layers import EngineLayers
from isoload.online import switch as module
from isoload.online.switch import AGREE_EVERY, Switch, parse
from support.host_waits import HostWaits
from support.launches import Launches
from support.processes import run_ranks

OURS, THEIRS = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2, dtype=torch.int64)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_EVERY", 0.0)


def make(path: Path, group: Any = None) -> Switch:
    return Switch(str(path), torch.device("cpu"), group, "engine")


def passes(switch: Switch, number: int = AGREE_EVERY) -> list[bool]:
    return [switch.step_ended() for _ in range(number)]


def choice(switch: Switch) -> str:
    slots = switch.choose(OURS, THEIRS)
    assert slots.dtype == OURS.dtype and slots.unique().numel() == 1
    return "theirs" if slots[0, 0] else "ours"


@pytest.mark.parametrize(("text", "state", "picked"), [("on", "on", "ours"), ("off\n", "off", "theirs")])
def test_the_file_turns_the_choice_in_place(
    at_once: None, tmp_path: Path, text: str, state: str, picked: str
) -> None:
    """After a pass of the cadence, in the same memory, which captured graphs read."""
    path = tmp_path / "switch"
    switch = make(path)
    address = switch.flag.data_ptr()
    assert not any(passes(switch)) and choice(switch) == "ours", "no file, nothing switched"
    path.write_text(text)
    changed = passes(switch)
    assert changed == [False] * (AGREE_EVERY - 1) + [state != "on"]
    assert (switch.state, choice(switch), switch.flag.data_ptr()) == (state, picked, address)
    path.unlink()
    assert not any(passes(switch)) and switch.state == state, "a file that is gone changes nothing"


BAD = {
    "": "state must be on or off, got ''",
    "maybe": "state must be on or off, got 'maybe'",
    "shadow": "shadow was removed: restart with ISOLOAD_MODE=shadow",
    "on:layers=0-7": "on:layers= was removed: use on or off, which apply to all layers",
}


@pytest.mark.parametrize("text", BAD)
def test_another_content_is_logged_once_and_changes_nothing(
    at_once: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(BAD[text])):
        parse(text)
    path = tmp_path / "switch"
    switch = make(path)
    path.write_text("off")
    passes(switch)
    path.write_text(text)
    assert not any(passes(switch, 3 * AGREE_EVERY)) and switch.state == "off"
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    if not text:  # it is being written
        assert not errors
        return
    (record,) = errors
    assert BAD[text] in record.getMessage() and record.getMessage().endswith("; off stays")


def test_the_file_is_read_once_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "switch"
    switch = make(path)
    passes(switch)
    path.write_text("off")
    assert not any(passes(switch, 2 * AGREE_EVERY))
    switch._next = 0.0
    assert any(passes(switch))


def late(rank: int, folder: str) -> list[tuple[int, str, str]]:
    """(pass, state, choice) of each change; the second rank has a file of its own with another state."""
    module.READ_EVERY = 0.0
    path = Path(folder, f"switch{rank}")
    switch, changes = make(path, dist.group.WORLD), []
    for number in range(1, 6 * AGREE_EVERY):
        if rank == 0 and number == 20:
            path.write_text("off")
        if number == 3 * AGREE_EVERY:  # in the pass after which ranks agree
            path.write_text("on" if rank == 0 else "off")
        if switch.step_ended():
            changes.append((number, switch.state, choice(switch)))
    return changes


def test_all_ranks_take_the_first_ranks_state_after_the_same_pass(tmp_path: Path) -> None:
    first, second = run_ranks(late, 2, str(tmp_path))
    assert first == second == [(2 * AGREE_EVERY, "off", "theirs"), (3 * AGREE_EVERY, "on", "ours")]


def test_one_launch_and_no_wait(tmp_path: Path) -> None:
    """On a GPU a choice is one kernel behind both; a dtype of the engine's own one more."""
    launches, switch = Launches(), make(tmp_path / "switch")
    with HostWaits(lambda tensor: []) as waits, launches:
        switch.flag = torch.ones((), dtype=torch.bool, device="cuda")
        ours, theirs = (torch.empty(64, 8, dtype=d, device="cuda") for d in (torch.int32, torch.int64))
        launches.clear()
        switch.choose(ours, ours)
        switch.choose(ours, theirs)
    assert [line.split(" ")[0] for line in launches.kernels] == ["where", "_to_copy", "where"]
    assert waits.waits == []


class Layers(EngineLayers[Any]):
    engine = "SGLang"
    engine_group = engine_rank = None  # type: ignore[assignment]


class Kept:
    """A layer's memory."""


def test_where_isoload_detaches_graphs_follow(tmp_path: Path) -> None:
    """They read the flags, which stay: nothing that a graph holds an address of may be freed."""
    layers = Layers()
    assert (
        layers.detach()
        == "SGLang chooses replicas from now on; graphs that were captured keep isoload's choice"
    )
    layers = Layers()
    layers.switch, layers.by_id = make(tmp_path / "switch"), {0: Kept()}
    kept = weakref.ref(layers.switch), weakref.ref(layers.by_id[0])
    assert layers.detach() == "SGLang chooses replicas from now on" and layers.detached
    switch, layer = (reference() for reference in kept)
    assert switch is not None and layer is not None and choice(switch) == "theirs"


def test_a_pipe_does_not_block_the_engine(
    at_once: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "switch"
    os.mkfifo(path)

    def waited(*_: Any) -> None:
        raise AssertionError("the switch waits for a writer")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(10)
    try:
        switch = make(path)
        assert not any(passes(switch, 2 * AGREE_EVERY)) and switch.state == "on"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().endswith(f"ISOLOAD_SWITCH {path}: {path}: is no regular file; on stays")
