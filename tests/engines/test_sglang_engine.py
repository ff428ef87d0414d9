"""A real SGLang engine over two CPU processes, without isoload and with it: expert parallel, redundant experts, experts
that move while tokens are generated. Hugging Face's model of the same checkpoint is the oracle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoint import make_qwen3_moe
from engine_runs import Batch, EngineRun, run_sglang

import isoload

EPLB = {
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True,
    "eplb_rebalance_num_iterations": 6, "expert_distribution_recorder_buffer_size": 6,
    "expert_distribution_recorder_mode": "stat",
}  # fmt: skip
RANKS, SLOTS = 2, 10
START = isoload.place(torch.arange(48).view(3, 16), isoload.Topology(RANKS), SLOTS, "scenario")
ATTACHED = {"ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_REPORT_SECONDS": "0.2"}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """(checkpoint, Hugging Face's greedy tokens)"""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, make_qwen3_moe(folder)


@pytest.fixture(scope="module")
def stock(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """isoload is installed, its variable is not set."""
    return run_sglang(oracle[0], tmp_path_factory.mktemp("runs") / "stock", {}, **EPLB)


@pytest.fixture(scope="module")
def balanced(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Its experts start where a file of isoload's says."""
    folder = tmp_path_factory.mktemp("runs")
    isoload.write_placement(START, folder / "start.json", format="sglang")
    given = EPLB | {"eplb_algorithm": "isoload", "init_expert_location": str(folder / "start.json")}
    return run_sglang(oracle[0], folder / "isoload", ATTACHED, **given)


def imbalance(batch: Batch) -> float:
    """max/mean copies per rank."""
    per_rank = torch.bincount(batch.slots.flatten() // SLOTS, minlength=RANKS)
    return float(per_rank.max() * RANKS / per_rank.sum())


def test_tokens_are_hugging_faces(
    oracle: tuple[Path, list[list[int]]], stock: EngineRun, balanced: EngineRun
) -> None:
    assert stock.tokens == oracle[1], "the control"
    assert balanced.tokens == oracle[1]


def test_experts_start_where_the_file_says(balanced: EngineRun) -> None:
    assert balanced.lines("init_expert_location from init_by_mapping")
    for layer in range(3):
        first = next(batch for batch in balanced.batches[0] if batch.layer == layer)
        held = START.slot_to_expert[layer][first.slots]
        assert torch.equal(held, first.ids.int()), layer


def test_experts_moved_while_tokens_were_generated(stock: EngineRun, balanced: EngineRun) -> None:
    for run in (stock, balanced):
        assert len(run.lines("TP0 EP0] [EPLBManager] rebalance end")) >= 3
    one_expert = {  # the slots that copies of a layer's busiest expert went to
        int(slot) for batch in balanced.batches[0] if batch.layer == 1 for slot in batch.slots[batch.ids == 0]
    }
    assert len(one_expert) >= 2


def test_all_ranks_choose_the_same_slots(balanced: EngineRun) -> None:
    """Else an expert's output would be added twice, or not at all."""
    first, second = balanced.batches
    assert len(first) == len(second) > 3 * 20
    for a, b in zip(first, second, strict=True):
        assert a.layer == b.layer and torch.equal(a.ids, b.ids) and torch.equal(a.slots, b.slots)


def test_isoload_says_what_it_does(balanced: EngineRun) -> None:
    (line,) = balanced.lines("isoload: attached")
    assert "--ep-dispatch-algorithm dynamic" in line and "policy exact on 3 of 3 layers" in line
    reports = balanced.lines("isoload SGLang: ")
    assert reports
    for report in reports:
        assert "peak == bound in all batches of 3 of 3 layers" in report
        before, after = re.search(r"imbalance ([\d.]+) evenly spread, ([\d.]+) planned", report).groups()
        assert float(after) <= float(before)


def test_ranks_are_more_level_than_stock(stock: EngineRun, balanced: EngineRun) -> None:
    """The same prompts, counted from the slots that left the router in each run."""
    means = [sum(map(imbalance, run.batches[0])) / len(run.batches[0]) for run in (stock, balanced)]
    assert len(stock.batches[0]) == len(balanced.batches[0])
    assert 1 <= means[1] < means[0]


def test_without_its_variable_isoload_is_not_there(stock: EngineRun) -> None:
    assert not [
        line for line in stock.lines("isoload") if "server_args" not in line and "isoload ->" not in line
    ]
