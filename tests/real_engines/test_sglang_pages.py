"""A real SGLang engine over two CPU processes with absent slots: their weights have no memory, tokens are Hugging
Face's, and memory moves between layers when experts move."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import make_qwen3_moe
from engine_runs import EngineRun, check_sent, in_shadow, run_sglang

import isoload
from isoload.analysis.rank_loads import read_recorded

RANKS, LAYERS, EXPERTS, TOKENS = 2, 3, 16, 206
REPLICAS = 2  # of a rank over all layers
EPLB = {
    "ep_dispatch_algorithm": "dynamic", "enable_eplb": True, "eplb_algorithm": "isoload",
    "eplb_rebalance_num_iterations": 2, "expert_distribution_recorder_buffer_size": 2,
    "expert_distribution_recorder_mode": "stat",
}  # fmt: skip
OWN_TOKENS = {
    "moe_a2a_backend": "deepep", "deepep_mode": "normal", "enable_dp_attention": True, "dp_size": 2,
}  # fmt: skip
PAGES = {
    "ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_RAGGED": "pages", "ISOLOAD_CHECK_WEIGHTS": "1",
    "ISOLOAD_PLACER": f"eplb:replicas={REPLICAS}",
}  # fmt: skip


@dataclass(frozen=True)
class Paged:
    """A run; and by rank a line of memory when the model was loaded and after each rebalance."""

    run: EngineRun
    lines: list[list[Any]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """(checkpoint, Hugging Face's greedy tokens)"""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, make_qwen3_moe(folder, tokens=TOKENS)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("placed") / "placement.json"
    isoload.write_placement(ragged(), path, "sglang", holes=True)
    return path


def ragged(placer: str = "eplb") -> isoload.Placement:
    loads = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(2)).pow(4)
    made = isoload.place(1000 * loads, RANKS, placer=placer, replicas=REPLICAS)
    return made.with_moe_layers(moe_layers=range(LAYERS))


def served(
    oracle: tuple[Path, list[list[int]]], folder: Path, file: Path, variables: dict[str, str], **options: Any
) -> Paged:
    stride = len(json.loads(file.read_text())["physical_to_logical_map"][0])
    more = {"ep_num_redundant_experts": stride - EXPERTS, "init_expert_location": str(file)}
    given = PAGES | {"ENGINE_PAGES": str(folder) + ".pages"} | variables
    run = run_sglang(oracle[0], folder, given, **(EPLB | more | options))
    paths = [Path(f"{folder}.pages.{rank}") for rank in range(RANKS)]
    return Paged(
        run, [list(map(json.loads, path.read_text().splitlines())) for path in paths if path.exists()]
    )


def check_memory(paged: Paged) -> None:
    """On both ranks and after every rebalance: the bytes in memory are those of the map's slots, and never more than at
    the start."""
    for rank, lines in enumerate(paged.lines):
        limit = None
        for line in lines:
            slots = (torch.tensor(line["table"]).view(LAYERS, RANKS, -1)[:, rank] >= 0).sum(1).tolist()
            resident = [line["resident"][str(layer)] for layer in range(LAYERS)]
            assert line["rank"] == rank
            assert resident == [n * line["size"][str(layer)] for layer, n in enumerate(slots)]
            limit = sum(slots) if limit is None else limit
            assert sum(slots) <= limit <= LAYERS * EXPERTS // RANKS + REPLICAS


@pytest.fixture(scope="module")
def moved(
    oracle: tuple[Path, list[list[int]]], file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Paged:
    """Every rebalance draws anew which layers have the replicas."""
    folder = tmp_path_factory.mktemp("runs") / "moved"
    return served(oracle, folder, file, {"ENGINE_DRAWN": "1"}, lengths=[24, 24, 24])


def test_tokens_are_hugging_faces(oracle: tuple[Path, list[list[int]]], moved: Paged) -> None:
    assert moved.run.tokens == [tokens[:24] for tokens in oracle[1]]


def test_memory_is_that_of_the_slots_after_every_rebalance(moved: Paged) -> None:
    check_memory(moved)
    assert len(moved.lines) == RANKS and len(moved.lines[0]) == len(moved.lines[1]) > 10
    capacities = {tuple((torch.tensor(line["table"]) >= 0).sum(1).tolist()) for line in moved.lines[0]}
    assert len(capacities) > 3, "memory moved between layers"
    (line,) = moved.run.lines("expert slots of a rank have memory")
    slots = LAYERS * EXPERTS // RANKS + REPLICAS
    assert f"isoload SGLang: {slots} of {LAYERS * (EXPERTS // RANKS + 1)} expert slots" in line


def test_every_slot_holds_its_expert_after_each_rebalance(moved: Paged) -> None:
    """By checksums of the slots with memory; else ISOLOAD_STRICT=1 would have ended the run."""
    slots = LAYERS * EXPERTS + RANKS * REPLICAS
    lines = moved.run.lines(f"isoload SGLang: {slots} slots have their experts' weights ")
    assert len(lines) == len(moved.lines[0])


def test_no_copy_goes_to_an_absent_slot(file: Path, moved: Paged) -> None:
    table = torch.tensor(json.loads(file.read_text())["physical_to_logical_map"])
    first = [batch for batch in moved.run.batches[0][: 2 * LAYERS]]
    assert all(torch.equal(table[batch.layer][batch.slots], batch.ids) for batch in first)


@pytest.mark.slow
def test_pages_of_a_gpu_follow_the_experts(
    oracle: tuple[Path, list[list[int]]], file: Path, tmp_path: Path
) -> None:
    """Over a stand-in for the CUDA driver's virtual memory."""
    variables = {"ENGINE_DRAWN": "1", "ENGINE_GPU_PAGES": "1"}
    paged = served(oracle, tmp_path / "run", file, variables, lengths=[24, 24, 24])
    assert paged.run.tokens == [tokens[:24] for tokens in oracle[1]]
    check_memory(paged)
    assert len(paged.lines[0]) == len(paged.lines[1]) > 10
    (line,) = paged.run.lines("absent slots on GPUs have been tested with a stand-in")
    assert "isoload SGLang" in line


@pytest.mark.slow
def test_two_hundred_rebalances_with_drawn_capacities(
    oracle: tuple[Path, list[list[int]]], file: Path, tmp_path: Path
) -> None:
    """One after each forward pass."""
    often = {"eplb_rebalance_num_iterations": 1, "expert_distribution_recorder_buffer_size": 1}
    variables = {"ENGINE_DRAWN": "1", "ISOLOAD_STALLED_SECONDS": "0"}
    paged = served(oracle, tmp_path / "run", file, variables, lengths=[TOKENS] * 3, **often)
    assert paged.run.tokens == oracle[1]
    check_memory(paged)
    assert len(paged.lines[0]) > 200 and len(paged.lines[1]) == len(paged.lines[0])


@pytest.mark.slow
def test_a_weight_update_in_place(oracle: tuple[Path, list[list[int]]], file: Path, tmp_path: Path) -> None:
    """SGLang writes the new weights to the slots of its lists, without absent slots; rebalances move them later."""
    tokens = make_qwen3_moe(tmp_path / "other", tokens=24, seed=1)
    variables = {"ENGINE_DRAWN": "1", "ISOLOAD_CHECK_WEIGHTS": "0"}
    paged = served(
        oracle, tmp_path / "run", file, variables, lengths=[24, 24, 24], update=str(tmp_path / "other")
    )
    assert paged.run.tokens == [of[:24] for of in oracle[1]] + tokens
    check_memory(paged)
    assert len(paged.lines[0]) > 20


@pytest.mark.slow
def test_shadow_mode_counts_where_slots_are_absent(
    oracle: tuple[Path, list[list[int]]], file: Path, tmp_path: Path
) -> None:
    """SGLang chooses the replicas; the record has the map with its absent slots."""
    variables = PAGES | in_shadow("ISOLOAD_SGLANG", tmp_path / "record") | {"ISOLOAD_CHECK_WEIGHTS": "0"}
    stride = len(json.loads(file.read_text())["physical_to_logical_map"][0])
    options = {"ep_num_redundant_experts": stride - EXPERTS, "init_expert_location": str(file)}
    run = run_sglang(oracle[0], tmp_path / "run", variables, ep_dispatch_algorithm="dynamic", **options)
    assert run.tokens == [of[:24] for of in oracle[1]]
    assert run.lines("expert slots of a rank have memory") and run.lines(
        "isoload SGLang in shadow, prefill: "
    )
    recorded = read_recorded(tmp_path / "record")
    assert recorded.tables[0].tolist() == json.loads(file.read_text())["physical_to_logical_map"]
    check_sent(recorded, run.batches[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placer", "variables", "options"),
    [
        ("craft", {"ISOLOAD_PLACER": f"craft:replicas={REPLICAS}"}, {}),
        ("scenario", {"ISOLOAD_PLACER": f"scenario:replicas={REPLICAS}"}, {}),
        ("scenario", {"ISOLOAD_PLACER": "eplb"}, {"eplb_rebalance_layers_per_chunk": 1}),
        ("eplb", {}, {"ep_dispatch_algorithm": "static"} | OWN_TOKENS),
        ("eplb", {}, OWN_TOKENS),
    ],
    ids=["craft", "scenario", "kept capacities in chunks", "static", "own tokens"],
)
def test_other_placers_and_dispatch(
    oracle: tuple[Path, list[list[int]]],
    tmp_path: Path,
    placer: str,
    variables: dict[str, str],
    options: dict[str, Any],
) -> None:
    path = tmp_path / "placement.json"
    isoload.write_placement(ragged(placer), path, "sglang", holes=True)
    paged = served(oracle, tmp_path / "run", path, variables, lengths=[24, 24, 24], **options)
    assert paged.run.tokens == [tokens[:24] for tokens in oracle[1]]
    check_memory(paged)
    assert len(paged.lines[0]) > 5
