"""Numeric options: each has a range, and no number ends in anything but success or one line that names its option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.cli.options import Range, check_ranges, ranges
from isoload.traces import Trace, write_trace
from support.documents import PLAIN

COMMANDS = {command.callback.__name__: command.callback for command in app.registered_commands}
TEXT = "0", "-1", "-0.5", "nan", "inf", "-inf", "1e308", "9" * 400, ""
MODEL = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
# Arguments with which a command succeeds, in a folder as made below.
WORDS = {
    "replay": ["run.npz", "--ranks", "4", "--policies", "none,exact"],
    "advise": [
        "--gpu",
        "h200",
        "--model",
        "model.json",
        "--ranks",
        "8",
        "--tokens-per-rank",
        "8",
        "--skew",
        "zipf:1",
    ],
    "report": ["recorded.npz"],
    "place": ["run.npz", "--ranks", "4", "--placer", "eplb", "-o", "-"],
    "convert": ["plan.json", "--format", "vllm", "-o", "-"],
    "inspect": ["run.npz", "--ranks", "4"],
    "demo": ["run.npz", "--ranks", "2", "--layer", "1"],
    "measure": ["--model", "tiny.json", "--dtype", "float32", "-o", "-"],
}
# Options that only mean something with others.
WITH = {
    "--rebalance-seconds": ["--every", "9"],
    "--memory-per-rank": [],
    "--expert-bytes": [],
    "--replica-memory": ["--expert-bytes", "4", "--placer", "scenario"],
}


def numeric(command: Any) -> dict[str, str]:
    """The flags of a command's numeric options, by parameter."""
    hints = get_type_hints(command)
    kinds = {name: set(get_args(hints[name]) or [hints[name]]) for name in signature(command).parameters}
    names = [name for name, kind in kinds.items() if kind & {int, float}]
    return {name: f"--{name.replace('_', '-')}" for name in names}


OPTIONS = [(name, flag) for name, command in COMMANDS.items() for flag in numeric(command).values()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small trace, a file of shadow mode, a placement and models; isoload measure takes few samples."""
    from isoload.analysis import measuring
    from isoload.analysis.rank_loads import RankLoads

    made = tmp_path_factory.mktemp("options")
    draw = np.random.default_rng(1)
    ids = draw.permuted(np.tile(np.arange(8), (48, 2, 1)), axis=-1)[..., :2]
    write_trace(Trace("run", 8, topk_ids=ids, tokens_per_batch=np.full(3, 16)), made / "run.npz")
    placement = isoload.place(draw.integers(1, 50, (6, 2, 8)), isoload.Topology(4), 3)
    isoload.write_placement(placement, made / "plan.json")
    (made / "model.json").write_text(json.dumps(MODEL))
    (made / "tiny.json").write_text(json.dumps(MODEL | {"hidden_size": 16, "moe_intermediate_size": 8}))
    copies = draw.integers(1, 9, (2, 2, 12))
    RankLoads(
        copies, placement.arrays[0], (1, 2), ("decode",) * 2, 8, 2, 0, placement.topology, "same", 1000
    ).save(made).rename(made / "recorded.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "COPIES", (1, 4, 16))
        patch.setattr(measuring, "SAMPLE_SECONDS", 0.0)
        yield made


@pytest.mark.parametrize("name", COMMANDS)
def test_every_numeric_option_has_a_range(name: str) -> None:
    assert set(ranges(COMMANDS[name])) == set(numeric(COMMANDS[name]))


@pytest.mark.parametrize(("command", "flag"), OPTIONS, ids=lambda value: value.strip("-"))
@pytest.mark.parametrize("text", TEXT, ids=lambda text: text[:5] or "empty")
def test_any_number_ends_in_success_or_in_one_line_that_names_the_option(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, flag: str, text: str
) -> None:
    monkeypatch.chdir(folder)
    words = [command, *WORDS[command], *WITH.get(flag, []), f"{flag}={text}"]
    done = CliRunner().invoke(app, words, env=PLAIN)
    if done.exit_code != 0:
        assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
        assert done.stderr.startswith("error: ") and flag in done.stderr and len(done.stderr) < 400
    if text not in ("0", "-0.5"):
        assert done.exit_code == 2


def drawing(
    share: Annotated[float, Range(0, 1)] = 0.5, count: Annotated[int | None, Range(1)] = None
) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": float("nan")}, "--share must be in 0..1, got nan"),
        ({"share": -0.1}, "--share must be in 0..1, got -0.1"),
        ({"count": 0}, "--count must be at least 1, got 0"),
        ({"count": 2**31}, "--count must be in 1..2147483647, got 2147483648"),
    ],
)
def test_the_message_names_the_option_and_its_range(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_ranges(drawing, {"share": 0.5, "count": None, **given})
    assert str(raised.value) == message
    check_ranges(drawing, {"share": 1, "count": None})
