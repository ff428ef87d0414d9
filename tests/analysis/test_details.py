"""What stands behind an answer: the saving by tokens of a rank, and with each constant halved and doubled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.advice import (
    NOW,
    PLAN_US,
    Candidate,
    Question,
    advise,
    layer_ms,
    over_even,
    run,
    saved_ms,
    step_ms,
)
from isoload.analysis.details import (
    EXCHANGE,
    EXPERTS,
    PLANNING,
    SPARE,
    TOKENS,
    by_tokens,
    experts_moved,
    least_memory,
    scaled,
    sensitivity,
    slots_answers,
    travelling,
)
from isoload.analysis.judge import Judged, judge_by
from isoload.analysis.models import Model, layer_times
from isoload.times import AllToAllTime, ExpertTime, LayerTime
from isoload.times.exchanges import Curve
from isoload.traces import Trace

SMALL = Model("small", 64, 32, 16, 2, 3, "bfloat16", 1024)
EXPERT = ExpertTime("g", "k", "bfloat16", 64, 32, a_us=10, b_us=2, c_us=1, rho_us=0.1, p=3, copies_to=2048)
STEP = AllToAllTime("g", "k", "dispatch", 4, 2, Curve(5.0, 0.05, 2.0), Curve(7.0, 0.2, 2.0), tokens_to=512)
TIMES = LayerTime(STEP, EXPERT, STEP)
ASKED = Question(SMALL, TIMES, isoload.Topology(4, 2), tokens=64)
OWN = Candidate("eplb", 2, "own")


def trace() -> Trace:
    shares = np.random.default_rng(0).dirichlet(np.full(16, 0.5), size=(1, 3))
    return Trace("skewed", 16, 2, np.rint(1e5 * np.repeat(shares, 6, 0)).astype(np.int64))


def judge(tokens: int) -> Judged:
    return judge_by(trace(), SMALL, 4, tokens)


def test_a_run_is_what_an_answer_sums_up() -> None:
    judged = judge(64)
    found = advise(ASKED, judged)
    answer = next(answer for answer in found.answers if answer.candidate == OWN)
    own, now = run(OWN, judged, ASKED), run(NOW, judged, ASKED)
    assert own.copies.shape == (8, 3, 4, 6) and own.received.shape == (8, 3, 4)
    assert (own.copies.sum((2, 3)) == 4 * 64 * 2).all() and own.rows.sum(1).min() >= 8 * 3 * (64 - 1e-6)
    assert own.rows.sum(0) == pytest.approx(own.received.sum((0, 1)))
    assert step_ms(own, ASKED) == answer.ms and saved_ms(now, own, ASKED) == answer.saved_ms
    one = [
        TIMES.seconds(
            own.copies[b, layer], own.received[b, layer], 64, over_even(own.crossing, ASKED)[b, layer]
        )
        for b in range(8)
        for layer in range(3)
    ]
    assert layer_ms(own, ASKED) == pytest.approx(1e3 * np.mean(one, 0))


def test_a_constant_is_halved_and_doubled_and_no_other() -> None:
    for name, field in EXPERTS.items():
        for factor in (0.5, 2.0):
            changed = scaled(TIMES, name, factor)
            assert getattr(changed.experts, field) == factor * getattr(EXPERT, field)
            assert replace(changed.experts, **{field: getattr(EXPERT, field)}) == EXPERT
            assert (changed.dispatch, changed.combine) == (STEP, STEP)
    for name, field in EXCHANGE.items():
        changed = scaled(TIMES, name, 2.0)
        assert changed.dispatch == changed.combine and changed.experts == EXPERT
        assert changed.dispatch is not None
        for before, after in ((STEP.low, changed.dispatch.low), (STEP.high, changed.dispatch.high)):
            assert after == before._replace(**{field: 2 * getattr(before, field)})
        assert scaled(LayerTime(None, EXPERT, None), name, 2.0) == LayerTime(None, EXPERT, None)
    flat = replace(TIMES, experts=replace(EXPERT, p=1.5))
    assert scaled(flat, "how far reading hides", 0.5).experts.p == 1  # below 1 there is no such kernel


def test_savings_follow_their_constants() -> None:
    """What both runs pay alike moves nothing; planning is paid by one of them; halves of all halve the saving."""
    judged = judge(64)
    now, own = run(NOW, judged, ASKED), run(OWN, judged, ASKED)
    found = sensitivity(now, own, ASKED)
    base = np.array(saved_ms(now, own, ASKED))
    assert set(found) == {PLANNING, *EXPERTS, *EXCHANGE}
    assert np.array(found["a kernel's launch"]) == pytest.approx(np.array([base, base]))
    for name in (*EXPERTS, *EXCHANGE):
        half, double = (replace(ASKED, layer=scaled(TIMES, name, factor)) for factor in (0.5, 2.0))
        assert found[name] == (saved_ms(now, own, half), saved_ms(now, own, double))
    taken = 1e-3 * SMALL.layers * np.array(PLAN_US["own"])
    half, double = (
        sorted(of[1] - taken[i] * factor for i, of in enumerate(bare(now, own))) for factor in (0.5, 2.0)
    )
    assert found[PLANNING] == (pytest.approx(half), pytest.approx(double))
    widths = [abs(sum(low) - sum(high)) for low, high in found.values()]
    assert widths == sorted(widths, reverse=True) and widths[0] > 0


def bare(now: object, own: object) -> list[tuple[float, float]]:
    """Without planning, (of now, saved) at each end."""
    before, after = (SMALL.layers * layer_ms(of, ASKED) for of in (now, own))
    return list(zip(before.tolist(), (before - after).tolist(), strict=True))


def test_by_tokens_says_what_each_count_saves_and_what_was_not_measured() -> None:
    slow = replace(TIMES, experts=replace(EXPERT, c_us=2.0))
    found = by_tokens(replace(ASKED, tokens=100), {"prefill": TIMES, "decode": slow}, (NOW, OWN), judge)
    assert [row.tokens for row in found["prefill"]] == sorted({*TOKENS, 100})
    for row in found["prefill"]:
        judged = judge(row.tokens)
        asked = replace(ASKED, tokens=row.tokens)
        loads = judged.loads if row.tokens == 100 else judged.loads[:2]  # those of the answer, or two batches
        now, own = (run(of, replace(judged, loads=loads), asked) for of in (NOW, OWN))
        assert row.ms == saved_ms(now, own, asked)
        ends = sorted(1 - b / a for a, b in zip(step_ms(now, asked), step_ms(own, asked), strict=True))
        assert row.share == pytest.approx(tuple(ends))
        assert row.extrapolated == (row.tokens > 512)
    assert found["decode"][-1].ms[0] > found["prefill"][-1].ms[0]


def test_a_phase_without_constants_is_left_out_and_said() -> None:
    model = replace(SMALL, hidden=2880, intermediate=2880, dtype="w4a16_mxfp4")
    both, gaps = layer_times("h100", "sglang", "prefill", model, isoload.Topology(8))
    assert set(both) == {"prefill", "decode"} and gaps == []
    none, gaps = layer_times("h100", "sglang", "prefill", SMALL, isoload.Topology(8))
    assert (
        none == {}
        and len(gaps) == 2
        and gaps[0].startswith("Kernels of prefill are skipped: model must have")
    )


def test_ways_to_use_memory_have_the_figures_of_their_runs() -> None:
    """Of placements made here, by the recorded batches; replicas take a part of one slot more."""
    judged, now = judge(64), advise(ASKED, judge(64)).now
    ways = {way.label: way for way in slots_answers(ASKED, judged, now)}
    # Of 8 replicas there would be more than one in each layer.
    labels = ["no replicas", "2 replicas a rank where they pay", "+1 slot"]
    assert list(ways) == [
        *(f"scenario, {label}" for label in labels),
        "scenario, +1 spare slot, within the node",
    ]
    assert judged.history is not None and np.array_equal(judged.history.sum(0), judged.calibration)
    none = isoload.place(judged.history, ASKED.topology, 4, "scenario")
    ran = run(Candidate("scenario", 0, "none"), judged, ASKED, none)
    first = ways["scenario, no replicas"]
    assert first.ms == step_ms(ran, ASKED) and first.slots_bytes == 0
    assert first.saved_ms == tuple(sorted(a - b for a, b in zip(now.ms, first.ms, strict=True)))
    one_more = 3 * SMALL.expert_bytes
    for label, way in ways.items():
        assert way.kv_tokens == (one_more - way.slots_bytes if way.slots_bytes < one_more else 0) // 1024, (
            label
        )
        assert way.imbalance >= 1 and (way.exports is None) == ("spare" not in label)
    assert ways["scenario, 2 replicas a rank where they pay"].slots_bytes <= 2 * SMALL.expert_bytes
    assert ways["scenario, +1 slot"].imbalance < first.imbalance


def test_ways_that_do_not_fit_are_left_out() -> None:
    judged, now = judge(64), advise(ASKED, judge(64)).now
    for changes, prefill, count in (
        ({"memory": 0.0}, True, 1), ({"memory": 2 * SMALL.expert_bytes}, True, 2), ({}, False, 3),
        ({"gathers": False}, True, 3),
        ({"topology": isoload.Topology(1), "layer": LayerTime(None, EXPERT, None)}, True, 0),
    ):  # fmt: skip
        assert len(slots_answers(replace(ASKED, **changes), judged, now, prefill)) == count, changes


def test_the_least_memory_among_the_fast() -> None:
    """Where loads are even nothing more is needed; where one expert has half of them, a replica is."""
    even = Judged(np.full((3, 16), 100), torch.full((2, 3, 4, 16), 8, dtype=torch.int32), False)
    now = advise(ASKED, even).now
    assert least_memory(slots_answers(ASKED, even, now)).slots_bytes == 0
    hot = torch.full((2, 3, 4, 16), 8, dtype=torch.int32)
    hot[:, :, :, 5] = 1000
    skewed = Judged(hot.sum((0, 2)).numpy().astype(np.int64), hot, False)
    assert least_memory(slots_answers(replace(ASKED, tokens=1120), skewed, now)).slots_bytes > 0


def test_what_travels_by_hand() -> None:
    """Exports and imports of the busiest rank; weights that the dispatch does not hide delay the experts."""
    homes = torch.arange(8, dtype=torch.int32).view(4, 2)
    slots = torch.cat([homes, torch.full((4, 1), -1, dtype=torch.int32)], 1).view(1, -1)
    placement = isoload.Placement(slots, isoload.Topology(4, 2), 8, spare_slots=1)
    last, new = slots.clone(), slots.clone()
    new.view(4, 3)[:, 2] = torch.tensor([2, 1, 1, -1])
    last.view(4, 3)[:, 2] = torch.tensor([3, 1, -1, -1])
    assert experts_moved(new, last, placement).tolist() == [[1.0, 1.0]]
    new.view(4, 3)[3, 2] = 0
    assert experts_moved(new, last, placement).tolist() == [[2.0, 1.0]]
    asked, known = replace(ASKED, tokens=4096), judge(4096)
    judged = replace(known, loads=known.loads.roll(5, dims=-1))  # another domain
    homes = isoload.place(judged.calibration, ASKED.topology, 5, "scenario", spare_slots=1)
    ran, travel = travelling(homes, asked, judged)
    assert (ran.copies.sum((2, 3)) == 4 * 4096 * 2).all() and travel.wait_ms == (0.0, 0.0)
    slow = replace(asked, topology=isoload.Topology(4, 2, bandwidths=(1e-3, 1e-3)))
    _, waits = travelling(replace(homes, topology=slow.topology), slow, judged)
    assert waits.exports == travel.exports > 0 and waits.ms == pytest.approx(travel.ms * 400e3)
    assert 0 < waits.wait_ms[1] <= waits.wait_ms[0] <= waits.ms
    assert SPARE.refill_above == 1.1
