"""What shadow mode recorded, against replays of the tokens themselves and sums by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isoload
from isoload.analysis.advice import PLAN_US, Candidate, Question, placed, saved_ms, step_ms
from isoload.analysis.judge import judge_by
from isoload.analysis.models import find_model, layer_time
from isoload.analysis.rank_loads import read_recorded
from isoload.analysis.server import imbalances, phases, sent_by_rank, served_runs, tokens_of, trace_of
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.traces import Trace
from support.recorded_runs import by_turns, save_run

EXPERTS, K, RANKS, LAYERS, TOKENS, SLOTS = 32, 4, 8, 2, 16, 5
PHASES = ("decode", "prefill", "decode", "decode", "prefill", "decode")
TOPOLOGY = isoload.Topology(RANKS)


def draw(sources: int) -> list[list[Any]]:
    """[passes][sources] tokens [T, L, K], skewed."""
    draws = np.random.default_rng(3)
    skew = np.log(draws.random((LAYERS, EXPERTS)) ** 3)
    made = []
    for phase in PHASES:
        rows = (4 if phase == "prefill" else 1) * TOKENS * RANKS // sources
        noise = draws.gumbel(size=(sources, rows, LAYERS, EXPERTS))
        made.append(list(np.argsort(-(skew + noise), axis=-1)[..., :K].astype(np.int32)))
    return made


def placement() -> isoload.Placement:
    counts = np.random.default_rng(5).random((LAYERS, EXPERTS)) ** 3
    return isoload.place(counts, TOPOLOGY, SLOTS)


@pytest.fixture(params=[RANKS, 1], ids=["own", "same"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Any, list[list[Any]]]:
    passes = draw(request.param)
    save_run(tmp_path, placement(), passes, PHASES, K)
    return read_recorded(tmp_path), passes


def test_figures_are_those_of_a_replay(run: tuple[Any, list[list[Any]]]) -> None:
    """isoload.analysis of the tokens on the engine's placement; as routed, from the slots of each token."""
    recorded, passes = run
    found = phases(recorded)
    assert [(of.name, of.batches) for of in found] == [("decode", (0, 2, 3, 5)), ("prefill", (1, 4))]
    for of in found:
        batches = [np.concatenate(passes[b]) for b in of.batches]
        sizes = np.array([len(rows) for rows in batches])
        trace = Trace("t", EXPERTS, topk_ids=np.concatenate(batches), tokens_per_batch=sizes)
        how = ReplaySettings(RANKS, 0, SLOTS, policies=("none", "exact"))
        replayed = replay(trace, how, placement=placement())
        exact = replayed.policies[1]
        assert of.planned.mean() == pytest.approx(exact.imbalance_mean, abs=1e-12)
        assert np.array_equal(trace_of(recorded, of).counts, trace.batch_counts())
        by_hand = []
        for rows in batches_by_source(passes, of.batches):
            loads = sum(by_turns(placement(), ids) for ids in rows).reshape(LAYERS, RANKS, -1).sum(-1)
            by_hand.append(loads.max(1) / loads.mean(1))
        assert of.routed == pytest.approx(np.mean(by_hand, 0)) and (of.planned < of.routed).all()
        assert of.tokens == sizes.mean() / RANKS == tokens_of(recorded, list(of.batches))
        worst = of.quantiles(of.routed)
        assert worst["worst"] == of.routed.max() and worst["half"] == pytest.approx(np.median(of.routed))


def batches_by_source(passes: list[list[Any]], chosen: tuple[int, ...]) -> list[list[Any]]:
    return [passes[b] for b in chosen]


def test_where_copies_come_from(run: tuple[Any, list[list[Any]]]) -> None:
    recorded, passes = run
    sent = sent_by_rank(recorded, 1)
    assert np.array_equal(sent.sum(1), recorded.slot_copies(1)) and (sent >= 0).all()
    if recorded.same_tokens:
        assert int((sent.max(1) - sent.min(1)).max()) == 1
        per_rank = sent.sum((0, 2))
        assert per_rank.max() - per_rank.min() < 0.05 * per_rank.mean()
    else:
        for rank in range(RANKS):
            assert np.array_equal(sent[:, rank], by_turns(placement(), passes[1][rank]))


def question(tokens: int) -> Question:
    model = find_model("gpt-oss-20b")
    return Question(model, layer_time("h100", "sglang", "decode", model, TOPOLOGY)[0], TOPOLOGY, tokens)


def test_what_is_saved_is_the_advice_on_that_placement(run: tuple[Any, list[list[Any]]]) -> None:
    """Of the planned run: exactly what advise's own candidate makes of these loads on this placement."""
    recorded, _ = run
    of = phases(recorded)[0]
    asked = question(of.tokens)
    served, planned = served_runs(recorded, of, asked)
    for pass_, batch in enumerate(of.batches):
        for run_, imbalance in zip((served, planned), imbalances(recorded, batch), strict=True):
            loads = run_.copies[pass_].sum(-1)
            assert loads.max(-1) / loads.mean(-1) == pytest.approx(imbalance)
        assert np.array_equal(served.copies[pass_].reshape(LAYERS, -1), recorded.slot_copies(batch))
    cheaper = sorted(a - b for a, b in zip(step_ms(served, asked), step_ms(planned, asked), strict=True))
    assert saved_ms(served, planned, asked) == tuple(cheaper)
    plan = asked.model.layers * 1e-3 * np.array(PLAN_US["exact"])  # planning is part of it
    without = np.array(step_ms(planned, asked)) - plan
    assert np.array(step_ms(planned, asked, planning=0.0)) == pytest.approx(without)


def test_the_advice_is_advises_own(run: tuple[Any, list[list[Any]]]) -> None:
    recorded, _ = run
    of = phases(recorded)[0]
    judged = judge_by(trace_of(recorded, of), find_model("gpt-oss-20b"), RANKS, of.tokens)
    assert np.array_equal(judged.calibration, recorded.trace.counts[[0, 2]].sum(0)) and judged.drawn
    assert placed(Candidate("eplb", 1, "exact"), judged, TOPOLOGY).slots_per_rank == SLOTS
