"""A real SGLang engine over two CPU processes whose switch turns while it serves requests and moves experts. Hugging
Face's model of the same checkpoint is the oracle. TEST_REQUESTS=1000 serves as many."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from itertools import cycle

import pytest
import torch
from checkpoint import PROMPTS, make_qwen3_moe
from engine_runs import EngineRun, run_sglang

EPLB = {
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True,
    "eplb_rebalance_num_iterations": 50, "expert_distribution_recorder_buffer_size": 50,
    "expert_distribution_recorder_mode": "stat", "eplb_algorithm": "isoload",
}  # fmt: skip
REQUESTS = int(os.environ.get("TEST_REQUESTS", 40 * len(PROMPTS)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineRun, list[list[int]]]:
    """(run, Hugging Face's tokens of each prompt)"""
    folder = tmp_path_factory.mktemp("switch")
    tokens = make_qwen3_moe(folder / "model")
    said, over = folder / "said", threading.Event()

    def turn() -> None:
        for state in cycle(("off", "on")):
            said.write_text(state)
            if over.wait(1.0):
                return

    variables = {
        "ISOLOAD_SGLANG": "1", "ISOLOAD_STRICT": "1", "ISOLOAD_SWITCH": str(said),
        "ISOLOAD_REPORT_SECONDS": "0.2",
    }  # fmt: skip
    turning = threading.Thread(target=turn)
    turning.start()
    try:
        run = run_sglang(folder / "model", folder / "run", variables, lengths=[24] * REQUESTS, **EPLB)
    finally:
        over.set()
        turning.join()
    return run, tokens


def test_no_request_fails_and_tokens_are_hugging_faces(served: tuple[EngineRun, list[list[int]]]) -> None:
    run, tokens = served
    assert run.tokens == [tokens[i % len(PROMPTS)] for i in range(REQUESTS)]
    assert len(run.lines("TP0 EP0] [EPLBManager] rebalance end")) >= 3


def test_all_ranks_turn_behind_the_same_pass(served: tuple[EngineRun, list[list[int]]]) -> None:
    """And choose the same slots, else a copy would be computed twice or not at all."""
    run, _ = served
    turns = Counter(re.findall(r"switched (\w+), after pass (\d+) on rank", run.log))
    assert set(turns.values()) == {2} and len(turns) >= 4, "once on each rank"
    assert {state for state, _ in turns} == {"on", "off"}
    for a, b in zip(*run.batches, strict=True):
        assert a.layer == b.layer and torch.equal(a.slots, b.slots)
