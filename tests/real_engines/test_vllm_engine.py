"""Real vLLM engines over two CPU processes, without isoload and with it: expert parallel, redundant experts, experts
that move while tokens are generated. Hugging Face's model of the same checkpoint is the oracle."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoint import make_qwen3_moe
from engine_runs import Batch, EngineRun, check_sent, in_shadow, run_vllm, run_vllm_pair
from vllm_cpu import map_and_record

import isoload
from isoload.analysis.rank_loads import read_recorded
from isoload.engines.tables import replica_lists
from support.sweeps import slow

EPLB = {
    "num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "use_async": False,
    "communicator": "torch_gloo", "log_balancedness": True,
}  # fmt: skip
OPTIONS = {"enable_eplb": True, "eplb_config": EPLB}
RANKS, SLOTS, LAYERS = 2, 10, 3
ATTACHED = {
    "ISOLOAD_VLLM": "1",
    "ISOLOAD_STRICT": "1",
    "ISOLOAD_REPORT_SECONDS": "0.2",
    "ISOLOAD_CHECK_WEIGHTS": "1",
}
Oracle = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """(checkpoint, Hugging Face's greedy tokens)"""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, make_qwen3_moe(folder, head_dim=32)  # vLLM's attention on CPUs takes no smaller one


@pytest.fixture(scope="module")
def stock(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """isoload is installed, its variable is not set."""
    return run_vllm(oracle[0], tmp_path_factory.mktemp("runs") / "stock", {}, **OPTIONS)


@pytest.fixture(scope="module")
def balanced(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    return run_vllm(oracle[0], tmp_path_factory.mktemp("runs") / "isoload", ATTACHED, **OPTIONS)


@pytest.fixture(scope="module")
def pair(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> list[EngineRun]:
    """Each rank has its own prompts, all counts plan; experts move as little as possible."""
    variables = ATTACHED | {"ISOLOAD_PLACER": "scenario:moves=2", "ISOLOAD_LOADS": "gathered"}
    return run_vllm_pair(oracle[0], tmp_path_factory.mktemp("runs") / "pair", variables, **OPTIONS)


@pytest.fixture(scope="module")
def apart(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> list[EngineRun]:
    """The same by each rank's own counts, as without ISOLOAD_LOADS; one rebalance, so that targets last."""
    options = OPTIONS | {"eplb_config": EPLB | {"step_interval": 40}}
    return run_vllm_pair(oracle[0], tmp_path_factory.mktemp("runs") / "apart", ATTACHED, **options)


@pytest.fixture(scope="module")
def shadow(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    folder = tmp_path_factory.getbasetemp() / "shadow_record"
    variables = in_shadow("ISOLOAD_VLLM", folder)
    return run_vllm(oracle[0], tmp_path_factory.mktemp("runs") / "shadow", variables, **OPTIONS)


@pytest.fixture(scope="module")
def shadow_pair(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> list[EngineRun]:
    folder = tmp_path_factory.getbasetemp() / "pair_record"
    variables = in_shadow("ISOLOAD_VLLM", folder)
    return run_vllm_pair(oracle[0], tmp_path_factory.mktemp("runs") / "shadow_pair", variables, **OPTIONS)


def loads(batch: Batch) -> torch.Tensor:
    """[R] copies per rank."""
    return torch.bincount(batch.slots.flatten() // SLOTS, minlength=RANKS)


def balancedness(run: EngineRun) -> list[tuple[float, int]]:
    """(mean, max) of the ranks' loads as vLLM logs them, step by step."""
    found = re.findall(r"avg_tokens=([\d.]+), max_tokens=(\d+)", run.log)
    return [(float(mean), int(most)) for mean, most in found]


def test_tokens_are_hugging_faces(oracle: Oracle, stock: EngineRun, balanced: EngineRun) -> None:
    assert stock.tokens == oracle[1], "the control"
    assert balanced.tokens == oracle[1]


def test_experts_moved_while_tokens_were_generated(stock: EngineRun, balanced: EngineRun) -> None:
    for run in (stock, balanced):
        assert len(run.lines("Rearranged experts")) >= 3
        one_expert = {  # the slots that copies of a layer's busiest expert went to
            int(slot) for batch in run.batches[0] if batch.layer == 1 for slot in batch.slots[batch.ids == 0]
        }
        assert len(one_expert) >= 2


def test_every_slot_holds_its_expert_after_each_rebalance(
    balanced: EngineRun, pair: list[EngineRun], apart: list[EngineRun]
) -> None:
    """By checksums of its weights; else ISOLOAD_STRICT=1 would have ended the run."""
    slots = LAYERS * RANKS * SLOTS
    for run in (balanced, pair[0], apart[0]):
        lines = run.lines(f"isoload vLLM: {slots} slots have their experts' weights ")
        rebalances = len(run.lines("Rearranged experts"))
        assert [line.split("weights ")[1] for line in lines] == [
            "at load",
            *["after a rebalance"] * rebalances,
        ]


def test_every_copy_is_at_its_expert(
    stock: EngineRun, balanced: EngineRun, pair: list[EngineRun], apart: list[EngineRun]
) -> None:
    for run in (stock, balanced, pair[0], apart[0]):
        for batch in (batch for rank in run.batches for batch in rank):
            assert torch.equal(batch.table[batch.slots], batch.ids)


def test_all_ranks_choose_the_same_slots(balanced: EngineRun) -> None:
    """Else an expert's output would be added twice, or not at all."""
    first, second = balanced.batches
    assert len(first) == len(second) > LAYERS * 20
    for a, b in zip(first, second, strict=True):
        assert a.layer == b.layer and torch.equal(a.ids, b.ids) and torch.equal(a.slots, b.slots)


def test_loads_are_recorded_as_vllm_counts_them(stock: EngineRun, balanced: EngineRun) -> None:
    """vLLM's own sums of what each run recorded, against the slots that left the router; both ranks count all."""
    for run in (stock, balanced):
        batches = [batch for batch in run.batches[0] if len(batch.ids)]
        steps = [batches[i : i + LAYERS] for i in range(0, len(batches), LAYERS)]
        wanted = []
        for step in steps:
            assert [batch.layer for batch in step] == list(range(LAYERS))
            per_rank = RANKS * torch.stack([loads(batch) for batch in step])
            wanted.append((float(per_rank.sum()) / RANKS, int(per_rank.amax(dim=1).sum())))
        logged = [pair for pair in balancedness(run) if pair[1]]
        assert len(logged) > 20 and logged == wanted[-len(logged) :]


def test_vllms_own_balancedness(stock: EngineRun, balanced: EngineRun) -> None:
    """mean/max of the ranks' loads, averaged over the same steps of the same prompts."""
    means = []
    for run in (stock, balanced):
        found = [mean / most for mean, most in balancedness(run) if most]
        means.append(sum(found) / len(found))
    assert means[0] < 0.9 and means[1] > 0.99


def test_isoload_says_what_it_does(balanced: EngineRun) -> None:
    (line,) = balanced.lines("isoload: attached")
    assert "same tokens on all ranks, no collective" in line and "policy exact on 3 of 3" in line
    reports = [line for line in balanced.lines("isoload vLLM: ") if "plans of" in line]
    assert reports
    for report in reports:
        assert "peak <= 1.001 bound in all batches of 3 of 3 layers" in report
        before, after = re.search(r"imbalance ([\d.]+) evenly spread, ([\d.]+) planned", report).groups()
        assert float(after) <= float(before)


def test_shadow_mode_is_stock_to_the_bit(stock: EngineRun, shadow: EngineRun) -> None:
    """Tokens, every slot on both ranks, and where experts lie after each of vLLM's own rebalances."""
    assert shadow.tokens == stock.tokens
    for ours, theirs in zip(shadow.batches, stock.batches, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.layer == b.layer and torch.equal(a.ids, b.ids) and torch.equal(a.slots, b.slots)
            assert torch.equal(a.table, b.table)
    assert balancedness(shadow) == balancedness(stock)
    (line,) = shadow.lines("isoload: in shadow mode with vLLM's EPLB")
    assert "1 of 1 passes is recorded, in 3 layers" in line and shadow.lines("isoload vLLM in shadow, decode")


@pytest.mark.parametrize("name", ["shadow", *slow("shadow_pair")])
def test_shadow_mode_counts_what_was_routed(
    name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = request.getfixturevalue(name)
    same = name == "shadow"
    held = read_recorded(tmp_path_factory.getbasetemp() / ("shadow_record" if same else "pair_record"))
    assert held.same_tokens == same
    assert "prefill" in held.phases and "decode" in held.phases and len(held.tables) > 1
    check_sent(held, run.batches[:1] if same else run[0].batches)


@pytest.mark.slow
def test_shadow_mode_of_ranks_with_tokens_of_their_own(oracle: Oracle, shadow_pair: list[EngineRun]) -> None:
    """Each copy where vLLM's rule puts it, tokens those of Hugging Face."""
    for rank, run in enumerate(shadow_pair):
        assert run.tokens == [tokens[: 24 - 8 * rank] for tokens in oracle[1][rank::2]]
        for batch in run.batches[rank]:
            lists = replica_lists(
                isoload.Placement(batch.table.view(1, -1).int(), isoload.Topology(RANKS), 16)
            )
            maps = lists.logical_to_physical[0], lists.num_replicas[0]
            slots = map_and_record(batch.ids, torch.zeros(RANKS * SLOTS), *maps, torch.tensor(False))
            assert torch.equal(slots, batch.slots)


def test_without_its_variable_isoload_is_not_there(stock: EngineRun) -> None:
    assert not stock.own_lines()


def test_ranks_with_tokens_of_their_own(
    oracle: Oracle, pair: list[EngineRun], apart: list[EngineRun]
) -> None:
    """Data parallel, with a real all-to-all behind the router; one rank is done before the other."""
    for runs in (pair, apart):
        for rank, run in enumerate(runs):
            assert run.tokens == [tokens[: 24 - 8 * rank] for tokens in oracle[1][rank::2]]


def test_gathered_loads_are_certified(pair: list[EngineRun]) -> None:
    (line,) = pair[0].lines("isoload: attached")
    assert "tokens of their own, loads gathered" in line and "placer scenario:moves=2" in line
    reports = [line for line in pair[0].lines("isoload vLLM: ") if "plans of" in line]
    assert reports and all(
        "peak <= 1.001 bound in all batches of 3 of 3 layers" in report for report in reports
    )


def test_loads_of_both_ranks_are_as_level_as_can_be(pair: list[EngineRun]) -> None:
    """Counted over what both routed: the busiest rank has its half, or what lies there alone if that is more."""
    first, second = pair[0].batches
    assert len(first) == len(second) > LAYERS * 20
    differ = 0
    for a, b in zip(first, second, strict=True):
        differ += a.ids.shape != b.ids.shape or not torch.equal(a.ids, b.ids)
        assert torch.equal(a.table, b.table)
        ids = torch.cat([a.ids.flatten(), b.ids.flatten()])
        on_rank = [torch.isin(ids, a.table[r * SLOTS : (r + 1) * SLOTS]) for r in range(RANKS)]
        alone = [int((on_rank[r] & ~on_rank[1 - r]).sum()) for r in range(RANKS)]
        assert int((loads(a) + loads(b)).max()) == max(-(-len(ids) // RANKS), *alone)
    assert differ > len(first) / 2


def test_own_counts_are_exchanged_between_steps(apart: list[EngineRun]) -> None:
    """Also while one rank has no requests, and behind a rebalance."""
    (line,) = apart[0].lines("isoload: attached")
    assert "tokens of their own, loads own: no collective in a pass" in line
    assert len(apart[0].lines("Rearranged experts")) >= 1
    reports = [
        re.search(r"(\d+) exchanges of 3 layers; imbalance ([\d.]+)", r)
        for r in apart[0].lines("isoload vLLM: ")
        if "slots have" not in r and "metrics stay" not in r
    ]
    assert reports and all(report is not None and float(report[2]) >= 1 for report in reports)


def peaks(runs: list[EngineRun], loads_of: Callable[[Batch], torch.Tensor]) -> float:
    """Sum over batches of both ranks' busiest."""
    return float(
        sum(
            (loads_of(a) + loads_of(b)).max()
            for a, b in zip(runs[0].batches[0], runs[0].batches[1], strict=True)
        )
    )


def test_own_counts_level_better_than_vllms_choice(apart: list[EngineRun]) -> None:
    """vLLM's rule on the same choices of experts and the same table."""

    def theirs(batch: Batch) -> torch.Tensor:
        lists = replica_lists(isoload.Placement(batch.table.view(1, -1).int(), isoload.Topology(RANKS), 16))
        counts = torch.zeros(RANKS * SLOTS, dtype=torch.int32)
        maps = lists.logical_to_physical[0], lists.num_replicas[0]
        map_and_record(batch.ids, counts, *maps, torch.tensor(True))
        return counts.view(RANKS, -1).sum(1)

    assert peaks(apart, loads) < 0.95 * peaks(apart, theirs)


def test_a_rebalance_moves_no_more_than_was_asked(pair: list[EngineRun]) -> None:
    tables = [
        [batch.table for batch in pair[0].batches[0] if batch.layer == layer] for layer in range(LAYERS)
    ]
    changes = [int((a != b).sum()) for layer in tables for a, b in pairwise(layer)]
    assert len(pair[0].lines("Rearranged experts")) >= 3 and 0 < max(changes) <= 2
