"""Commands on records of several files, and what they state of layers: place, convert, replay, inspect, doctor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.traces import Identity, Trace, write_trace

EXPERTS = 8


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def rank_files(tmp_path: Path) -> list[Path]:
    """SGLang's per_pass files of two ranks of a model with one dense layer."""
    paths = []
    for rank in range(2):
        rng = np.random.default_rng(rank)
        records = []
        for number in range(4):
            counts = rng.integers(1, 50, (3, EXPERTS))
            counts[0] = 0
            copies = {"global_physical_count": torch.from_numpy(counts)}
            records.append({"forward_pass_id": number, "rank": rank, **copies})
        slots = torch.arange(EXPERTS).repeat(3, 1)
        paths.append(tmp_path / f"rank{rank}.pt")
        torch.save({"records": records, "last_physical_to_logical_map": slots}, paths[-1])
    return paths


@pytest.mark.parametrize(
    "command",
    [
        ("place", "--ranks", 2, "-o", "p.json"),
        ("replay", "--ranks", 2, "--policies", "even", "--top-k", 2),
        ("inspect",),
    ],
    ids=lambda command: command[0],
)
def test_every_command_unites_the_files_of_ranks(
    command: tuple[object, ...], rank_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    both = run(name, *rank_files, *options)
    assert both.exit_code == 0, both.stderr
    assert "read as: 2 rank files" in both.stdout or "read as 2 rank files of one recording" in both.stdout
    message = (
        f"error: {rank_files[1]}: the recording lacks the files of rank 0 of 2: add them, or --allow-missing"
    )
    assert message in refused(name, rank_files[1], *options, *(["--force"] if name == "place" else []))
    alone = run(
        name, rank_files[1], *options, "--allow-missing-ranks", *(["--force"] if name == "place" else [])
    )
    assert alone.exit_code == 0 and "warning: " in alone.stderr and "rank 0 of 2" in alone.stderr


def test_recordings_are_counted(rank_files: list[Path], tmp_path: Path) -> None:
    again = tmp_path / "again.npz"
    trace = isoload.read_trace(rank_files)
    write_trace(trace, again)
    result = run("place", *rank_files, again, "--ranks", 2, "-o", tmp_path / "p.json")
    assert "read as 2 recordings: 2 rank files of one recording" in flat(result.stdout)
    result = run("inspect", *rank_files, again)
    assert "read as: 2 recordings" in result.stdout and "8 batches, 2 layers" in result.stdout
    wrong = tmp_path / "wrong.npz"
    write_trace(Trace("wrong", EXPERTS, counts=trace.counts, layer_ids=(4, 5)), wrong)
    write_trace(Trace("part", EXPERTS, counts=trace.counts, layer_ids=(2, 3)), again)
    assert "trace part has layers 2..3" in refused("inspect", *rank_files, again)
    united = run("inspect", *rank_files, wrong)
    assert (
        "layers: 1..2, 4..5" in united.stdout
        and "read as: 2 pipeline stages of one recording" in united.stdout
    )


def test_stages_and_same_layers(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"loads{number}.pt")
        torch.save(torch.from_numpy(np.random.default_rng(number).integers(1, 9, (2, EXPERTS))), paths[-1])
    base = ["place", *paths, "--ranks", 2, "-o", tmp_path / "p.json", "--force"]
    assert "pass --same-layers or --stages" in refused(*base)
    assert run(*base, "--stages").exit_code == 0
    assert isoload.read_placement(tmp_path / "p.json").num_layers == 4
    assert run(*base, "--same-layers").exit_code == 0
    assert isoload.read_placement(tmp_path / "p.json").num_layers == 2


def test_place_and_convert_between_numberings(rank_files: list[Path], tmp_path: Path) -> None:
    base = ["place", *rank_files, "--ranks", 2, "--force", "-o", tmp_path / "p.json"]
    message = "numbers layers as the model does (1..2) and does not state which layers of the model are dense"
    assert message in refused(*base, "--format", "vllm")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 3, "first_k_dense_replace": 1}))
    for stated in (["--first-moe-layer", 1], ["--model", config]):
        assert run(*base, "--format", "vllm", *stated).exit_code == 0
        found = isoload.read_placement(tmp_path / "p.json", isoload.Topology(2))
        assert found.layer_ids == (0, 1) and found.identity.numbering == "moe"
    assert "first_moe_layer" not in refused(*base, "--first-moe-layer", 1, "--model", config)
    assert "--first-moe-layer must come without model" in refused(
        *base, "--first-moe-layer", 1, "--model", config
    )
    lacking = refused(*base, "--format", "vllm", "--model", "deepseek-ai/DeepSeek-V3")
    assert "has layer 1, which is dense in the model (MoE layers 3..60)" in lacking
    assert run(*base, "--format", "sglang").exit_code == 0
    convert = [
        "convert",
        tmp_path / "p.json",
        "-o",
        tmp_path / "q.yaml",
        "--format",
        "tensorrt-llm",
        "--ranks",
        2,
        "--force",
    ]
    assert "has a row for each of the model's 3 layers and does not state which are dense" in refused(
        *convert
    )
    assert run(*convert, "--first-moe-layer", 1, "--extra-layers", "3,4").exit_code == 0
    text = (tmp_path / "q.yaml").read_text()
    assert re.findall(r"^ +(\d+):", text, re.M) == ["1", "2", "3", "4"]
    assert "--extra-layers must be layer numbers such as 61,62, got '3,x'" in refused(
        *convert, "--extra-layers", "3,x"
    )
    assert run(*base, "--extra-layers", "3").exit_code == 0
    assert isoload.read_placement(tmp_path / "p.json").layer_ids == (1, 2, 3)


def test_doctor_describes_files(rank_files: list[Path], tmp_path: Path) -> None:
    assert run("place", *rank_files, "--ranks", 2, "-o", tmp_path / "p.json").exit_code == 0
    shown = run("doctor", tmp_path / "p.json").stdout
    assert "layers: 1..2 (the model's own layer numbers)" in shown and "ranks: 2 on nodes of 2" in shown
    isoload.write_placement(isoload.read_placement(tmp_path / "p.json"), tmp_path / "s.json", "sglang")
    shown = flat(run("doctor", tmp_path / "s.json").stdout)
    assert "with a row for dense layers too" in shown and "ranks: not stated by this format" in shown
    record = run("doctor", *rank_files, "--json", "-").stdout
    rows: list[dict[str, Any]] = json.loads(record)
    facts = {row["name"]: row["detail"] for row in rows}
    assert facts["ranks"] == "0..1, each with a file of its own" and facts["model"] == "not recorded"
    (tmp_path / "torn.json").write_text('{"physical_to_logical_map": [[0, 1]')
    assert "torn.json" in refused("doctor", tmp_path / "torn.json")


def test_replay_of_a_placement_whose_layers_are_numbered_otherwise(
    rank_files: list[Path], tmp_path: Path
) -> None:
    trace = isoload.read_trace(rank_files)
    placement = isoload.place(trace, isoload.Topology(2), 5).with_moe_layers(1)
    isoload.write_placement(placement, tmp_path / "v", "vllm")
    base = [
        "replay",
        *rank_files,
        "--placement",
        tmp_path / "v",
        "--ranks",
        2,
        "--policies",
        "even",
        "--top-k",
        2,
    ]
    assert "and does not state which layers of the model are dense" in refused(*base)
    assert run(*base, "--first-moe-layer", 1).exit_code == 0
    assert placement.identity == Identity("model", (1, 2))


def test_an_array_with_its_axes_in_another_order_is_refused(tmp_path: Path) -> None:
    ids = np.stack([np.random.default_rng(n).permutation(EXPERTS)[:2] for n in range(6 * 600)]).reshape(
        6, 600, 2
    )
    path = tmp_path / "stacked.npz"
    np.savez(path, topk_ids=ids)
    message = (
        "topk_ids [6, 600, 2] means 6 tokens of 600 layers, top-2; with the first two axes in the other order"
    )
    assert message in refused("inspect", path) and "600 tokens of 6 layers" in refused("inspect", path)
    with pytest.raises(ValueError, match="600 tokens of 6 layers: write it as .tokens, layers, ...."):
        isoload.read_trace(path)
    assert run("inspect", path, "--layers", "0-599").exit_code == 0
    np.savez(path, topk_ids=ids.transpose(1, 0, 2))
    assert isoload.read_trace(path).num_layers == 6
