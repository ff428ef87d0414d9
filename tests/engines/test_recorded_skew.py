"""Recorded routing: counts and rows drawn are the trace's, files and options that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoload.engines import recorded_skew
from isoload.engines.recorded_skew import RecordedRouting, rows_from_counts
from isoload.traces.identity import Identity
from isoload.traces.npz import write_trace
from isoload.traces.record import Trace

TRACE = str(Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz")
CPU = torch.device("cpu")


def counted(tmp_path: Path, **fields: Any) -> str:
    """A trace of counts alone: layers 3 and 5 of a model, two batches of decode and one of prefill."""
    draw = np.random.default_rng(0)
    counts = draw.multinomial(4000, draw.dirichlet(np.full(16, 0.8), 2), (3, 2))
    path = tmp_path / "counts.npz"
    trace = Trace(
        "counts", 16, 4, counts=counts, layer_ids=(3, 5), cluster=("decode", "prefill", "decode"), **fields
    )
    write_trace(trace, path)
    return str(path)


@pytest.mark.parametrize("seed", range(20))
def test_rows_have_the_counts_and_no_expert_twice(seed: int) -> None:
    draw = np.random.default_rng(seed)
    experts, top_k = int(draw.integers(5, 300)), int(draw.integers(1, 5))
    counts = draw.multinomial(10**6, draw.dirichlet(np.full(experts, draw.choice([0.1, 1.0]))))
    rows = rows_from_counts(counts, top_k, 1024, seed)
    assert rows.shape == (1024, top_k)
    assert all(len(set(row)) == top_k for row in rows.tolist())
    part = counts / counts.sum() * 1024 * top_k
    if part.max() <= 1024:
        assert np.abs(np.bincount(rows.ravel(), minlength=experts) - part).max() <= 1
    assert not (rows_from_counts(counts, top_k, 1024, seed) - rows).any(), "a seed repeats the rows"
    with pytest.raises(ValueError, match=f"must have at least {top_k} experts with copies, got 0"):
        rows_from_counts(np.zeros(experts, np.int64), top_k, 8, 0)


def test_recorded_choices_are_drawn_as_they_are() -> None:
    """One round through the tokens has the trace's counts; each batch starts at the row after the last batch."""
    routing = RecordedRouting(f"{TRACE}:seed=3")
    routing.prepare(7, 32, 4, CPU)
    chosen = torch.cat([routing(7, tokens) for tokens in (1, 1000, 6167)])
    want = routing.trace.topk_ids[:, 7]
    assert sorted(map(tuple, chosen.tolist())) == sorted(map(tuple, want.tolist()))
    assert torch.equal(routing(7, 1), chosen[:1])
    again, other = (RecordedRouting(f"{TRACE}:seed={seed}") for seed in (3, 4))
    for one in (again, other):
        one.prepare(7, 32, 4, CPU)
    assert torch.equal(again(7, 1000), chosen[:1000]) and not torch.equal(other(7, 1000), chosen[:1000])


def test_counts_are_drawn_within_a_hundredth(tmp_path: Path) -> None:
    """Of all batches, or of the batches of a phase."""
    path = counted(tmp_path)
    for option, batches in (("", [0, 1, 2]), (":phase=decode", [0, 2])):
        routing = RecordedRouting(path + option)
        routing.prepare(5, 16, 4, CPU)
        found = np.bincount(
            np.concatenate([routing(5, 500).numpy().ravel() for _ in range(200)]), minlength=16
        )
        want = routing.trace.counts[batches, 1].sum(0)
        part = np.minimum(want / want.sum(), 0.25)  # no expert is twice in a row
        assert (
            np.abs(found / found.sum() - part / part.sum()).sum()
            < 0.01 + 2 * (want / want.sum() > 0.25).any()
        )


def test_ranks_with_tokens_of_their_own_differ() -> None:
    routing, other = RecordedRouting(TRACE), RecordedRouting(TRACE)
    routing.prepare(0, 32, 4, CPU)
    other.prepare(0, 32, 4, CPU, part=0.5)
    rows = routing(0, 7168)
    assert torch.equal(other(0, 3584), rows[3584:])


REFUSED = {
    ":speed=1": "options of a recorded routing must be seed=N or phase=NAME, got 'speed=1'",
    ":seed=": "options of a recorded routing must be seed=N or phase=NAME, got 'seed='",
    ":seed=x": "seed must be a whole number, got 'x'",
    ":phase=prefill": "has no batches of phase prefill, but of: none",
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_does_not_fit(option: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[option]):
        RecordedRouting(TRACE + option)


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    routing = RecordedRouting(counted(tmp_path))
    for facts in ((16, 8), (32, 4)):
        with pytest.raises(
            ValueError, match=f"16 experts and 4 per token but the model has {facts[0]} and {facts[1]}"
        ):
            routing.prepare(3, *facts, CPU)
    with pytest.raises(ValueError, match="has layers .* and no layer 4"):
        routing.prepare(4, 16, 4, CPU)
    vague = RecordedRouting(counted(tmp_path, identity=Identity("order")))
    with pytest.raises(ValueError, match="does not state which layers"):
        vague.prepare(3, 16, 4, CPU)


def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    for engine, name in (("vLLM", recorded_skew.VLLM_STRATEGY), ("SGLang", "ISOLOAD_ROUTING")):
        with pytest.raises(SystemExit, match=f"isoload: {name}: .*nowhere.npz"):
            recorded_skew.attach_to(engine, str(tmp_path / "nowhere.npz"))


def test_an_engine_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(SystemExit, match="ISOLOAD_ROUTING: SGLang is not as isoload expects"):
        recorded_skew.attach_to("SGLang", TRACE)
