"""A real SGLang engine over two CPU processes that hold tokens of their own: attention data parallelism, `dynamic` over
an all-to-all backend. The harness computes experts over gloo where SGLang would call DeepEP, which needs a GPU; all
else is SGLang's. Hugging Face's model of the same checkpoint is the oracle."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from checkpoint import PROMPTS, make_qwen3_moe
from engine_runs import EngineRun, check_sent, in_shadow, run_sglang

from isoload.analysis.rank_loads import read_recorded

ALL_TO_ALL = {
    "moe_a2a_backend": "deepep", "deepep_mode": "normal", "enable_dp_attention": True, "dp_size": 2,
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True,
    "eplb_rebalance_num_iterations": 7, "expert_distribution_recorder_buffer_size": 7,
    "expert_distribution_recorder_mode": "stat",
}  # fmt: skip
ATTACHED = {
    "ISOLOAD_SGLANG": "1",
    "ISOLOAD_REPORT_SECONDS": "0.01",
    "ISOLOAD_CHECK_WEIGHTS": "1",
    "ENGINE_FLIP": "1 2 4",
}
LAYERS = 3
LENGTHS = [24, 6, 24]  # the second prompt is all that its rank has


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """(checkpoint, Hugging Face's greedy tokens)"""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, make_qwen3_moe(folder)


@pytest.fixture(scope="module")
def balanced(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    folder = tmp_path_factory.mktemp("runs") / "isoload"
    return run_sglang(
        oracle[0], folder, ATTACHED, lengths=LENGTHS, **ALL_TO_ALL
    )  # and, late, a bit of a weight flips


@pytest.fixture(scope="module")
def shadow(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Behind `static`, which draws nothing."""
    folder = tmp_path_factory.getbasetemp() / "all_to_all_record"
    variables = in_shadow("ISOLOAD_SGLANG", folder)
    options = ALL_TO_ALL | {"ep_dispatch_algorithm": "static"}
    return run_sglang(
        oracle[0], tmp_path_factory.mktemp("runs") / "shadow", variables, lengths=LENGTHS, **options
    )


def test_shadow_mode_counts_what_each_rank_routed(
    oracle: tuple[Path, list[list[int]]], shadow: EngineRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The files of both ranks join by their passes, idle ones included."""
    assert shadow.tokens == [tokens[:length] for tokens, length in zip(oracle[1], LENGTHS, strict=True)]
    recorded = read_recorded(tmp_path_factory.getbasetemp() / "all_to_all_record")
    assert not recorded.same_tokens and set(recorded.phases) == {"prefill", "decode"}
    first, second = (of.any((1, 2)) for of in recorded.sent)
    assert (first != second).any(), "one rank is idle in some passes"
    check_sent(recorded, shadow.batches)


def test_tokens_are_hugging_faces(oracle: tuple[Path, list[list[int]]], balanced: EngineRun) -> None:
    """While experts move: each rebalance takes the targets away, which the next exchange makes anew."""
    assert balanced.tokens == [tokens[:length] for tokens, length in zip(oracle[1], LENGTHS, strict=True)]
    assert len(balanced.lines("TP0 EP0] [EPLBManager] rebalance end")) >= 3


def test_isoload_says_whose_counts(balanced: EngineRun) -> None:
    (line,) = balanced.lines("isoload: attached")
    assert (
        "--ep-dispatch-algorithm dynamic (loads own: no collective in a pass, targets renewed every" in line
    )
    assert "policy exact on 3 of 3 layers" in line


def test_ranks_hold_tokens_of_their_own(balanced: EngineRun) -> None:
    """A prompt's rows once, over both ranks; without an all-to-all each would route all of them."""
    prefills = [[len(b.ids) for b in rank if b.layer == 0 and len(b.ids) > 2] for rank in balanced.batches]
    assert all(prefills) and sum(map(sum, prefills)) == sum(map(len, PROMPTS))


def test_a_corrupted_slot_is_named(balanced: EngineRun) -> None:
    """By all ranks, where and when it happened, and isoload leaves the choice to SGLang."""
    checks = [line for line in balanced.lines("isoload SGLang: ") if "weights" in line]
    right, wrong = (
        [line for line in checks if of in line] for of in ("have their experts'", "are not those")
    )
    assert [line.split("weights ")[1] for line in right] == ["at load", *["after a rebalance"] * 2]
    named = r"after a rebalance: layer 2, rank 1, slot 14 should hold expert \d+ and holds no known expert"
    named += r"\. SGLang chooses replicas from now on"
    assert len(wrong) == 2 and all(re.search(named, line) for line in wrong), wrong


def test_ranks_exchange_at_the_same_passes(balanced: EngineRun) -> None:
    """One of them runs idle ones from the seventh on."""
    exchanges = Counter(line[line.index("exchange of") :] for line in balanced.lines("exchange of"))
    assert set(exchanges) == {f"exchange of {LAYERS} layers on rank {rank}" for rank in (0, 1)}
    assert len(set(exchanges.values())) == 1, "as often on each"


def test_reports_tell_what_an_exchange_found(balanced: EngineRun) -> None:
    (report, *_) = balanced.lines("isoload SGLang: 1 exchanges")
    found = re.search(r"1 exchanges of 3 layers; imbalance ([\d.]+) of all copies", report)
    assert found is not None and 1 <= float(found[1]) <= 2, report
