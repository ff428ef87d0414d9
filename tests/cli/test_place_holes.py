"""isoload place with absent slots: --replicas, --holes and --rectangle, and the memory that they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.traces import Trace, write_trace
from isoload.weights.pages import resident_slots
from support.documents import PLAIN

torch.set_num_threads(1)
RANKS, LAYERS, EXPERTS = 4, 3, 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    draw = np.random.default_rng(1)
    counts = np.floor(50 * 1.5 ** draw.normal(size=(6, LAYERS, EXPERTS))).astype(np.int64)
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    write_trace(Trace("small", EXPERTS, 2, counts=counts, layer_ids=(1, 3, 4)), path)
    return ["place", path, "--ranks", RANKS, "--extra-layers", "0,2", "--replicas", 1]


def run(*args: Any) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env=PLAIN)


@pytest.mark.parametrize("placer", ["scenario", "eplb", "craft"])
def test_a_ragged_file_for_sglang(base: list[Any], tmp_path: Path, placer: str) -> None:
    """Absent slots come last, dense layers have no replicas, and SGLang without isoload does not take the file."""
    result = run(*base, "-o", tmp_path / "p.json", "--placer", placer, "--format", "sglang", "--holes")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "p.json").read_text())
    table = torch.tensor(content["physical_to_logical_map"])
    slots = resident_slots(table, RANKS)
    assert content["isoload_ragged"] == "pages" and table.shape == (5, 3 * RANKS)
    assert slots[[0, 2]].tolist() == [[2] * RANKS] * 2
    assert slots.sum() <= 5 * EXPERTS + RANKS and (slots.sum(0) <= 11).all()
    (line,) = (line for line in result.output.splitlines() if line.startswith("Start SGLang: "))
    assert line.startswith(
        "Start SGLang: ISOLOAD_SGLANG=1 ISOLOAD_RAGGED=pages python -m sglang.launch_server "
    )
    assert "--ep-num-redundant-experts 4 " in line
    again = isoload.read_placement(tmp_path / "p.json", RANKS)
    assert torch.equal(again.slot_to_expert, table.int())


def test_the_memory_of_replicas_and_the_kv_cache_beside_one_slot_more(
    base: list[Any], tmp_path: Path
) -> None:
    """An expert of 3 x 2880 x 2880 weights of 17/32 bytes; gpt-oss-20b has 49,152 bytes of KV cache for a token."""
    model = ["--model", "gpt-oss-20b"]
    command = [word for word in base if word not in ("--extra-layers", "0,2")]
    result = run(
        *command,
        "-o",
        tmp_path / "p.json",
        "--placer",
        "eplb",
        "--json",
        "-",
        "--expert-bytes",
        2**30,
        *model,
    )
    memory = json.loads(result.stdout)["memory"]
    assert memory == {
        "replica_bytes": 2**30, "one_slot_more_bytes": 3 * 2**30, "kv_tokens": 2 * 2**30 // 49_152
    }  # fmt: skip


def test_a_rectangle_keeps_the_ragged_slots_and_fills_the_others(base: list[Any], tmp_path: Path) -> None:
    command = [word for word in base if word not in ("--extra-layers", "0,2")]
    for name, more in (("ragged", ()), ("full", ("--rectangle",))):
        assert run(*command, "-o", tmp_path / f"{name}.json", "--placer", "eplb", *more).exit_code == 0
    ragged, full = (isoload.read_placement(tmp_path / f"{n}.json") for n in ("ragged", "full"))
    there = ragged.slot_to_expert >= 0
    assert (~there).any() and (full.slot_to_expert >= 0).all()
    assert torch.equal(ragged.slot_to_expert[there], full.slot_to_expert[there])
    rows = full.slot_to_expert.view(-1, 3)
    assert all(len(set(row.tolist())) == 3 for row in rows), "no expert twice on a rank"
    assert run(*base, "-o", tmp_path / "s.json", "--format", "sglang", "--rectangle").exit_code == 0


REFUSED = {
    "placement must have no absent slots for an engine's file, layer 3 is ragged: isoload place --holes writes it for "
    "SGLang with ISOLOAD_RAGGED=pages, --rectangle fills the slots with replicas": ["--format", "sglang"],
    "holes must be left out with rectangle, which fills all slots": [
        "--format", "sglang", "--holes", "--rectangle"
    ],
    "holes must come with a format that can have absent slots (sglang; isoload's own always can), got vllm": [
        "--format", "vllm", "--holes"
    ],
    "replicas 1 cannot be combined with replica_memory 5: leave one of them out": [
        "--replica-memory", 5, "--expert-bytes", 1
    ],
    "replicas 1 cannot be combined with the placer's option replicas: leave one of them out": [
        "--placer", "craft:replicas=1"
    ],
    "replicas must be left out for placer trivial, which has no budget, got 1": ["--placer", "trivial"],
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(base: list[Any], tmp_path: Path, message: str) -> None:
    result = run(*base, "-o", tmp_path / "p.json", *REFUSED[message])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == f"error: {message}\n"
    assert not (tmp_path / "p.json").exists()
