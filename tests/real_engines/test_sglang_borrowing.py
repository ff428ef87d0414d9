"""A real SGLang engine over two CPU processes in whose prefill experts travel (ISOLOAD_SPARE_SLOTS). Hugging Face's
model of the same checkpoint is the oracle of every run."""

from __future__ import annotations

import json
import threading
from itertools import compress, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import SKEWED, make_qwen3_moe
from engine_runs import EngineRun, in_shadow, run_sglang

RANKS, EXPERTS, TOKENS, LAYERS = 2, 16, 12, 3
LENGTHS = [TOKENS - i % 3 * 4 for i in range(len(SKEWED))]  # so that prefills come one or two at a time
OPTIONS = {
    "ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "dynamic", "prompts": SKEWED, "lengths": LENGTHS,
    "max_running_requests": 2,
}  # fmt: skip
EPLB = {
    "enable_eplb": True, "eplb_algorithm": "isoload", "eplb_rebalance_num_iterations": 7,
    "expert_distribution_recorder_buffer_size": 7, "expert_distribution_recorder_mode": "stat",
}  # fmt: skip
SIZE = EXPERTS // RANKS + 1
TRAVELS = {
    "ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_SPARE_SLOTS": "1",
    "ISOLOAD_POLICY": "prefill=llep:within=node:threshold=1:min_chunk=1:refill_above=1.02,decode=exact",
}  # fmt: skip


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """(checkpoint, Hugging Face's greedy tokens)"""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tokens = make_qwen3_moe(folder, tokens=TOKENS, prompts=SKEWED)
    return folder, [of[:length] for of, length in zip(tokens, LENGTHS, strict=True)]


def fills(folder: Path, num_ranks: int = RANKS) -> list[list[dict[str, Any]]]:
    """By process and batch what has travelled; a pass that is killed at the end may be on one rank alone."""
    ranks = [
        list(map(json.loads, path.read_text().splitlines())) for path in sorted(folder.glob("record_fills.*"))
    ]
    assert len(ranks) == num_ranks
    length = min(map(len, ranks))
    return [rows[:length] for rows in ranks]


def check(
    folder: Path, run: EngineRun, tokens: list[list[int]], moves: int = 1, ranks: int = RANKS
) -> list[dict[str, Any]]:
    """Tokens, agreement of the ranks, every copy in a slot of its expert; returns the batches."""
    assert run.tokens == tokens
    by_rank = fills(folder, ranks)
    tokens_of = [[row.pop("tokens") for row in rows] for rows in by_rank]
    assert all(rows == by_rank[0] for rows in by_rank), "loads, fills and moves of every batch"
    for rows, some, batches in zip(by_rank, tokens_of, run.batches, strict=True):
        for row, batch in zip(compress(rows, some), batches, strict=False):
            assert row["layer"] == batch.layer
            routed = batch.slots >= 0  # rows of padding are masked behind an all-to-all
            assert torch.equal(torch.tensor(row["table"])[batch.slots[routed]], batch.ids[routed])
    assert sum(row["counts"][1] for row in by_rank[0]) >= moves
    assert all(row["borrows"] or not any(row["counts"]) for row in by_rank[0]), "decode keeps the last fill"
    return by_rank[0]


def imbalances(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean max/mean of prefill batches over the last fill and over the new one."""
    prefill = [row["counts"] for row in rows if row["counts"][4]]
    before, after = (sum(counts[i] / counts[4] for counts in prefill) / len(prefill) for i in (2, 3))
    return before, after


def test_experts_travel_between_rebalances_and_tokens_are_hugging_faces(
    oracle: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """SGLang rebalances between the batches, and no slot ever has other weights than its expert's."""
    variables = TRAVELS | {"ISOLOAD_CHECK_WEIGHTS": "1", "ISOLOAD_REPORT_SECONDS": "0.2"}
    run = run_sglang(oracle[0], tmp_path / "run", variables, **OPTIONS, **EPLB)
    rows = check(tmp_path / "run", run, oracle[1], moves=5)
    before, after = imbalances(rows)
    assert 1 <= after < before - 0.01
    assert len(run.lines("TP0 EP0] [EPLBManager] rebalance end")) >= 3
    assert len(run.lines("slots have their experts' weights")) >= 4 and not run.lines("weights are not those")
    assert run.lines("spare slots of 3 layers were filled")
    (line,) = run.lines("isoload: attached")
    assert "policy llep in prefill, exact in decode on 3 of 3 layers" in line


@pytest.mark.slow
def test_a_weight_update_between_batches(oracle: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """SGLang writes other weights to the slots that its map lists, and prefill fills the spare slots from these."""
    tokens = make_qwen3_moe(tmp_path / "other", tokens=TOKENS, prompts=SKEWED, seed=1)
    after = [of[:length] for of, length in zip(tokens, LENGTHS, strict=True)]
    run = run_sglang(oracle[0], tmp_path / "run", TRAVELS, **OPTIONS, update=str(tmp_path / "other"))
    rows = check(tmp_path / "run", run, oracle[1] + after)
    empty = [i for i, row in enumerate(rows) if -1 in row["table"]]
    filled = [i for i, row in enumerate(rows) if row["counts"][1]]
    assert len(rows) / 3 < empty[0] < filled[-1], "empty after the update alone, and filled again"


@pytest.mark.slow
def test_chunks_of_prefill_share_batches_with_decode_until_a_rank_detaches(
    oracle: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """A bit flips in the third rebalance, which the weight check finds; SGLang then chooses replicas by its map, which
    lists no spare slot.
    """
    chunks = {"ep_num_redundant_experts": 4, "chunked_prefill_size": 32, "enable_mixed_chunk": True}
    variables = TRAVELS | {
        "ISOLOAD_SPARE_SLOTS": "2", "ISOLOAD_CHECK_WEIGHTS": "1", "ENGINE_FLIP": "1 2 4", "ISOLOAD_STRICT": "0",
    }  # fmt: skip
    run = run_sglang(oracle[0], tmp_path / "run", variables, **(OPTIONS | EPLB | chunks))
    check(tmp_path / "run", run, oracle[1])
    assert len(run.lines("SGLang chooses replicas from now on")) == RANKS
    planned = len(fills(tmp_path / "run")[0])
    later = [batch for rank in run.batches for batch in rank[planned:]]
    size = EXPERTS // RANKS + 2
    assert len(later) > 20 and not any((batch.slots % size >= size - 2).any() for batch in later)


# Each process attends to requests of its own. SGLang gathers rows without an all-to-all by NCCL alone.
OWN_TOKENS = {
    "enable_dp_attention": True, "dp_size": 2, "ep_dispatch_algorithm": "lp", "moe_a2a_backend": "deepep",
    "deepep_mode": "normal",
}  # fmt: skip


@pytest.mark.slow
def test_lp_over_an_all_to_all(oracle: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Between rebalances, too; a rank without requests joins every plan."""
    variables = TRAVELS | {"ISOLOAD_CHECK_WEIGHTS": "1", "ENGINE_LP": "1"}
    run = run_sglang(oracle[0], tmp_path / "run", variables, **(OPTIONS | EPLB | OWN_TOKENS))
    rows = check(tmp_path / "run", run, oracle[1], moves=3)
    before, after = imbalances(rows)
    assert 1 <= after < before
    assert len(run.lines("EP0] [EPLBManager] rebalance end")) >= 2 and not run.lines("weights are not those")
    empty = [not (batch.slots >= 0).any() for rank in run.batches for batch in rank]
    assert any(empty), "a rank had no tokens in some passes"


@pytest.mark.slow
def test_shadow_mode_reports_what_would_travel(oracle: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    variables = TRAVELS | in_shadow("ISOLOAD_SGLANG", tmp_path / "record")
    run = run_sglang(oracle[0], tmp_path / "run", variables, **OPTIONS)
    assert run.tokens == oracle[1]
    lines = run.lines("in shadow, prefill, 1 spare slot on each rank: ")
    moves = [int(line.split("each rank: ")[1].split(" experts")[0]) for line in lines]
    assert sum(moves) > 0 and all(
        "GiB) would have travelled" in line for line, n in zip(lines, moves, strict=True) if n
    )


@pytest.mark.slow
def test_the_switch_turns_while_experts_travel(oracle: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    said, over = tmp_path / "said", threading.Event()

    def turn() -> None:
        for state in cycle(("off", "on")):
            said.write_text(state)
            if over.wait(1.0):
                return

    turning = threading.Thread(target=turn)
    turning.start()
    many = {"lengths": LENGTHS * 8}
    try:
        run = run_sglang(
            oracle[0], tmp_path / "run", TRAVELS | {"ISOLOAD_SWITCH": str(said)}, **(OPTIONS | EPLB | many)
        )
    finally:
        over.set()
        turning.join()
    assert run.tokens == oracle[1] * 8
    ranks = fills(tmp_path / "run")
    assert ranks[0] == ranks[1] and sum(row["counts"][1] for row in ranks[0])
    assert {state for state in ("on", "off") if run.lines(f"switched {state}, after pass")} == {"on", "off"}
