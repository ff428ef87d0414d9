"""A real SGLang engine over two CPU processes, without isoload and with it: expert parallel, redundant experts, experts
that move while tokens are generated. Hugging Face's model of the same checkpoint is the oracle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import PROMPTS, make_qwen3_moe
from engine_runs import Batch, EngineRun, check_sent, in_shadow, run_sglang
from typer.testing import CliRunner

from isoload import Balancer, Placement, Topology
from isoload.analysis.rank_loads import read_recorded
from isoload.analysis.server import phases
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.cli.app import app
from isoload.traces import Trace
from support import measured_times

EPLB = {
    "ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic", "enable_eplb": True,
    "eplb_rebalance_num_iterations": 7, "expert_distribution_recorder_buffer_size": 7,
    "expert_distribution_recorder_mode": "stat",
}  # fmt: skip
RANKS, SLOTS, LAYERS = 2, 10, 3
EXPERTS, HIDDEN, INNER = 16, 64, 64  # padded by SGLang on CPU
ATTACHED = {
    "ISOLOAD_SGLANG": "1",
    "ISOLOAD_STRICT": "1",
    "ISOLOAD_REPORT_SECONDS": "0.2",
    "ISOLOAD_CHECK_WEIGHTS": "1",
    "SGLANG_LOG_EXPERT_LOCATION_METADATA": "1",
    "ISOLOAD_POLICY": "prefill=exact,decode=exact_active",
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """(checkpoint, Hugging Face's greedy tokens)"""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, make_qwen3_moe(folder)


@pytest.fixture(scope="module")
def stock(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """isoload is installed, its variable is not set. At its end the engine writes what it has recorded."""
    folder = tmp_path_factory.getbasetemp() / "stock"
    variables = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder / "recorded")}
    return run_sglang(oracle[0], folder, variables, **EPLB)


@pytest.fixture(scope="module")
def placed(stock: EngineRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """README's path, on what the engine recorded: replayed, placed, replayed as placed."""
    record = tmp_path_factory.getbasetemp() / "stock" / "recorded"
    target = tmp_path_factory.mktemp("placed") / "placement.json"
    slots = ["--ranks", str(RANKS), "--slots-per-rank", str(SLOTS)]
    place = ["place", str(record), "-o", str(target), *slots, "--format", "sglang"]
    replay = ["replay", str(record), *slots, "--top-k", "4", "--policies", "none,exact"]
    for command in (replay, place, [*replay, "--placement", str(target)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    return target


@pytest.fixture(scope="module")
def balanced(
    oracle: tuple[Path, list[list[int]]], placed: Path, tmp_path_factory: pytest.TempPathFactory
) -> EngineRun:
    """It starts from where isoload placed the experts, with the options that isoload prints for the file."""
    start = {"eplb_algorithm": "isoload", **printed_options(placed)}
    return run_sglang(oracle[0], tmp_path_factory.mktemp("runs") / "isoload", ATTACHED, **(EPLB | start))


def printed_options(file: Path) -> dict[str, Any]:
    """The options that `isoload doctor FILE` prints for an engine's file, which does not state the ranks."""
    printed = CliRunner().invoke(app, ["doctor", str(file)], env={"COLUMNS": "1000"}).output
    (line,) = re.findall(
        rf"--ep-num-redundant-experts \d+ --init-expert-location {re.escape(str(file))}", printed
    )
    words = line.split()
    options = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return options | {"ep_num_redundant_experts": int(options["ep_num_redundant_experts"])}


@pytest.fixture(scope="module")
def kept(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """No new map pays, and rank 1 is measured to be twice as fast as rank 0."""
    folder = tmp_path_factory.mktemp("kept")
    experts = measured_times.times().to_json()["experts"] | {"hidden": HIDDEN, "intermediate": INNER}
    times = measured_times.written(folder / "times.json", ranks=RANKS, speeds=[1.0, 2.0], experts=experts)
    rule = {"ISOLOAD_POLICY": "exact", "ISOLOAD_REBALANCE": "gain_ms=1000", "ISOLOAD_TIMES": str(times)}
    return run_sglang(oracle[0], folder / "run", ATTACHED | rule, **EPLB, eplb_algorithm="isoload")


@pytest.fixture(scope="module")
def shadow(oracle: tuple[Path, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    folder = tmp_path_factory.getbasetemp() / "shadow_record"
    variables = in_shadow("ISOLOAD_SGLANG", folder)
    return run_sglang(oracle[0], tmp_path_factory.mktemp("runs") / "shadow", variables, **EPLB)


def imbalance(batch: Batch) -> float:
    """max/mean copies per rank."""
    per_rank = torch.bincount(batch.slots.flatten() // SLOTS, minlength=RANKS)
    return float(per_rank.max() * RANKS / per_rank.sum())


def test_tokens_are_hugging_faces(
    oracle: tuple[Path, list[list[int]]], stock: EngineRun, balanced: EngineRun
) -> None:
    assert stock.tokens == oracle[1], "the control"
    assert balanced.tokens == oracle[1]


def test_an_engine_starts_from_what_was_placed_on_its_record(placed: Path, balanced: EngineRun) -> None:
    """SGLang's own map says so of every slot, and the copies of the first pass are in slots with their experts."""
    rows = json.loads(placed.read_text())["physical_to_logical_map"]
    said = [f"layer={i}: ep0={row[:SLOTS]} ep1={row[SLOTS:]}" for i, row in enumerate(rows)]
    log = balanced.log[balanced.log.index("Initial expert_location_metadata") :].splitlines()[2 : 2 + LAYERS]
    assert log == [line.replace(", ", ",") for line in said]
    table = torch.tensor(rows)
    for batch in balanced.batches[0][:LAYERS]:
        assert torch.equal(table[batch.layer][batch.slots], batch.ids)


def test_each_phase_has_its_policy(placed: Path, balanced: EngineRun) -> None:
    """Until experts move: prefill's in the passes that bring a prompt, decode's in the others."""
    table = torch.tensor(json.loads(placed.read_text())["physical_to_logical_map"]).int()
    placement, told_apart = Placement(table, Topology(RANKS), 16), set()
    for batch in balanced.batches[0][: EPLB["eplb_rebalance_num_iterations"] * LAYERS]:
        phase = "prefill" if len(batch.ids) > len(PROMPTS) else "decode"
        spread, active = (
            Balancer(placement, batch.layer, policy, tokens="same")(batch.ids)
            for policy in ("exact", "exact_active")
        )
        assert torch.equal(batch.slots, active if phase == "decode" else spread)
        told_apart |= {phase} if not torch.equal(spread, active) else set()
    assert told_apart == {"prefill", "decode"}


def test_experts_moved_while_tokens_were_generated(stock: EngineRun, balanced: EngineRun) -> None:
    for run in (stock, balanced):
        assert len(run.lines("TP0 EP0] [EPLBManager] rebalance end")) >= 3
    one_expert = {  # the slots that copies of a layer's busiest expert went to
        int(slot) for batch in balanced.batches[0] if batch.layer == 1 for slot in batch.slots[batch.ids == 0]
    }
    assert len(one_expert) >= 2


def test_a_new_map_that_does_not_pay_is_not_applied(
    oracle: tuple[Path, list[list[int]]], kept: EngineRun
) -> None:
    assert kept.tokens == oracle[1]
    assert len(kept.lines("TP0 EP0] [EPLBManager] rebalance end")) >= 3
    assert len(kept.lines("a rebalance was skipped (ISOLOAD_REBALANCE): the new map would save")) == RANKS
    for layer in range(LAYERS):
        batches = [batch for batch in kept.batches[0] if batch.layer == layer]
        assert all(torch.equal(batch.table, batches[0].table) for batch in batches if batch.table.numel())
        slots_of = [{int(p) for b in batches for p in b.slots[b.ids == e]} for e in range(EXPERTS)]
        assert sum(map(len, slots_of)) <= RANKS * SLOTS and not set.intersection(*slots_of)


def test_a_faster_rank_computes_more_copies(kept: EngineRun, stock: EngineRun) -> None:
    ranks = [
        torch.bincount(torch.cat([b.slots.flatten() for b in run.batches[0]]) // SLOTS, minlength=RANKS)
        for run in (kept, stock)
    ]
    (slow, fast), (first, second) = (copies.double() / copies.sum() for copies in ranks)
    assert fast > slow and fast - slow > second - first


def test_every_slot_holds_its_expert_after_each_rebalance(balanced: EngineRun) -> None:
    """By checksums of its weights; else ISOLOAD_STRICT=1 would have ended the run."""
    lines = balanced.lines(f"isoload SGLang: {LAYERS * RANKS * SLOTS} slots have their experts' weights ")
    rebalances = len(balanced.lines("TP0 EP0] [EPLBManager] rebalance end"))
    assert [line.split("weights ")[1] for line in lines] == ["at load", *["after a rebalance"] * rebalances]


def test_all_ranks_choose_the_same_slots(balanced: EngineRun) -> None:
    """Else an expert's output would be added twice, or not at all."""
    first, second = balanced.batches
    assert len(first) == len(second) > 3 * 20
    for a, b in zip(first, second, strict=True):
        assert a.layer == b.layer and torch.equal(a.ids, b.ids) and torch.equal(a.slots, b.slots)


def test_isoload_says_what_it_does(balanced: EngineRun) -> None:
    (line,) = balanced.lines("isoload: attached")
    assert (
        "--ep-dispatch-algorithm dynamic" in line
        and "policy exact in prefill, exact_active in decode on 3 of 3" in line
    )
    reports = [line for line in balanced.lines("isoload SGLang: ") if "plans of 3 layers" in line]
    assert reports and all(re.search(r"imbalance [\d.]+ evenly spread, [\d.]+ planned", r) for r in reports)


def test_ranks_are_more_level_than_stock(stock: EngineRun, balanced: EngineRun) -> None:
    """The same prompts, counted from the slots that left the router in each run."""
    means = [sum(map(imbalance, run.batches[0])) / len(run.batches[0]) for run in (stock, balanced)]
    assert len(stock.batches[0]) == len(balanced.batches[0])
    assert 1 <= means[1] < means[0]


def test_shadow_mode_is_stock_to_the_bit(stock: EngineRun, shadow: EngineRun) -> None:
    """Tokens, and every slot of every copy on both ranks, while experts move."""
    assert shadow.tokens == stock.tokens
    for ours, theirs in zip(shadow.batches, stock.batches, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.layer == b.layer and torch.equal(a.ids, b.ids) and torch.equal(a.slots, b.slots)


def test_shadow_mode_counts_what_was_routed(
    shadow: EngineRun, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """And its figures are those of a replay of the tokens that were routed, on each placement."""
    folder = tmp_path_factory.getbasetemp() / "shadow_record"
    recorded = read_recorded(folder)
    check_sent(recorded, shadow.batches[:1])
    assert recorded.same_tokens and {"prefill", "decode"} == set(recorded.phases) and len(recorded.tables) > 1
    (of,) = [of for of in phases(recorded) if of.name == "decode"]
    planned = []
    for batch in of.batches:
        number = first_pass(folder) + batch
        routed = shadow.batches[0][(number - 1) * LAYERS : number * LAYERS]
        ids, placement = torch.stack([b.ids for b in routed], 1).int().numpy(), recorded.placement(batch)
        trace = Trace("t", 16, topk_ids=ids, identity=placement.identity)
        how = ReplaySettings(RANKS, 0, SLOTS, policies=("exact",), batch_tokens=len(routed[0].ids))
        (exact,) = replay(trace, how, placement=placement).policies
        planned.append(exact.imbalance_mean)
    assert of.planned.mean() == pytest.approx(sum(planned) / len(planned))
    page = ["report", str(folder), "--json", str(tmp_path / "report.json")]
    assert CliRunner().invoke(app, page).exit_code == 0


def first_pass(folder: Path) -> int:
    """Passes follow each other from here on."""
    return min(int(path.stem.rsplit("-", 1)[1]) for path in folder.iterdir())


def test_shadow_mode_says_what_it_would_give(shadow: EngineRun) -> None:
    (line,) = shadow.lines("isoload: in shadow mode with")
    assert (
        "--ep-dispatch-algorithm dynamic, which chooses as without isoload: 1 of 1 passes is recorded, in 3 layers"
        in line
    )
    said = [
        re.search(r"imbalance ([\d.]+) as routed, ([\d.]+) as isoload would", x)
        for x in shadow.lines("in shadow, ")
    ]
    assert said and all(of is not None and float(of[2]) <= float(of[1]) for of in said)


def test_without_its_variable_isoload_is_not_there(stock: EngineRun) -> None:
    assert not stock.own_lines()
