"""bench_libra and its streams: which batches calibrate, runs of small streams, the rivals."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from isoload.analysis.batches import Fold, make_batches
from isoload.traces import Trace, write_trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import bench_libra
from lib import published_ahead
from lib.streams import Stream, joined, parts, streams, workloads

EXPERTS, LAYERS, K = 16, 3, 2


def draw(tokens: int, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(EXPERTS, 0.3)) + 1e-3
    ids = [rng.choice(EXPERTS, K, replace=False, p=shares / shares.sum()) for _ in range(tokens * LAYERS)]
    return Trace("drawn", EXPERTS, topk_ids=np.array(ids, np.int32).reshape(tokens, LAYERS, K))


def stream_of(trace: Trace, fold: Fold, tokens: int, deal: str = "even") -> Stream:
    return Stream(trace, make_batches(trace, tokens), fold, tokens, 4, deal, 8, 4)


def test_first_halves_calibrate_and_second_halves_are_shuffled() -> None:
    traces = [draw(100, 1), draw(60, 2)]
    trace, fold = joined(traces, 32)
    assert fold == Fold((0, 1), (2, 3)) and trace.topk_ids is not None
    ids = [t.topk_ids for t in traces if t.topk_ids is not None]
    first = np.concatenate([x[: len(x) // 2] for x in ids])
    second = np.concatenate([x[len(x) // 2 :] for x in ids])
    assert np.array_equal(trace.topk_ids[:64], first[:64])
    known = {row.tobytes() for row in second}
    assert all(row.tobytes() in known for row in trace.topk_ids[64:])
    seen, fresh = parts(stream_of(trace, fold, 32))
    assert seen.topk_ids is not None and fresh.topk_ids is not None
    assert np.array_equal(np.concatenate([seen.topk_ids, fresh.topk_ids]), trace.topk_ids)
    assert len(seen.topk_ids) == 64


def test_sequences_stay_whole_where_they_are_dealt() -> None:
    traces = [
        Trace(f"task {seed}", EXPERTS, topk_ids=draw(96, seed).topk_ids, seq_id=np.arange(96) // 8)
        for seed in (1, 2)
    ]
    trace, fold = joined(traces, 32, by_sequence=True)
    assert trace.seq_id is not None and trace.topk_ids is not None
    judged = trace.seq_id[32 * len(fold.calibrate) :]
    assert (np.diff(judged) != 0).sum() == len(np.unique(judged)) - 1, "a sequence lies in one piece"
    assert not np.isin(judged, trace.seq_id[: 32 * len(fold.calibrate)]).any()
    batch = stream_of(trace, fold, 32, "sequence").batch(fold.replay[0])
    assert batch.num_tokens == 32


def test_figures_of_a_small_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_libra, "SPARE", (1, 4))
    stream = stream_of(*joined([draw(300, 3)], 32), 32)
    rows = bench_libra.imbalance(stream, 2)
    found = {(r["policy"], r["spare"], r["predict"]): r for r in rows}
    ahead = (len(bench_libra.AHEAD) + 1) * len(bench_libra.PREDICTIONS) + len(bench_libra.LINA)
    others = len(bench_libra.IN_TIME) + len(bench_libra.RESIDENT)
    assert len(found) == len(rows) == 2 * (others + ahead)
    for row in rows:
        assert row["imbalance_mean"] >= 1 and row["imbalance_p99"] >= row["imbalance_mean"] * 0.9
        assert row["batches"] == 2 and row["layers"] == LAYERS
        assert row["import_mb"] == pytest.approx(row["imports_mean"] * 3 * 8 * 4 * 2 / 1e6, abs=1e-6)
        assert row["imports_mean"] <= row["spare"]
        if row["policy"] == "hedge held":
            planned = found["hedge", row["spare"], row["predict"]]
            assert row["imbalance_mean"] >= planned["imbalance_mean"]
            assert row["imports_mean"] == planned["imports_mean"]
        if row["policy"] in ("hedge", "eplb exact"):
            assert row["over_bound_max"] == 1
        if row["policy"] in ("none", *(f"eplb {name}" for name in bench_libra.RESIDENT)):
            assert row["imports_mean"] == 0
    none = found["none", 4, "true loads"]["imbalance_mean"]
    assert found["hedge", 4, "perfect"]["imbalance_mean"] < none
    assert found["harmoeny", 4, "true loads"]["imbalance_mean"] < none
    assert found["lina", 4, "perfect"]["imbalance_mean"] < none


def test_a_partner_is_one_other_expert() -> None:
    stream = stream_of(*joined([draw(300, 3)], 32), 32)
    forecast = bench_libra.PartnerForecast("0", stream.trace, stream.batches, stream.fold, 0)
    chosen = np.arange(EXPERTS)
    wrong = forecast.wrong(chosen, np.random.default_rng(0))
    assert sorted(wrong) == list(range(EXPERTS)) and (wrong != chosen).all()
    batch = stream.batch(stream.fold.replay[0])
    loads = batch.loads(EXPERTS)
    assert torch.equal(forecast.of(batch, 0, loads, 0)[..., wrong], loads)


def test_workloads_come_from_their_own_sources() -> None:
    made = list(workloads(steps=2, tokens=16))
    assert [stream.name.split()[0] for stream in made] == [f"W{i}" for i in range(8)]
    for stream in made:
        loads = stream.batch(1).loads(256)
        assert torch.equal(loads[0].sum(0), torch.from_numpy(stream.batches.counts[1, 0]))
        sent = [len(ids) for ids in stream.batches.workload.topk_ids(1)]
        assert loads[0].sum(-1).tolist() == [8 * n for n in sent]


def test_traffic_is_what_loops_count() -> None:
    stream = stream_of(*joined([draw(300, 3)], 32), 32)
    rows = bench_libra.traffic(stream, 1)
    none = next(row for row in rows if row["policy"] == "none")
    batch, left = stream.batch(stream.fold.replay[0]), 0
    for layer in range(LAYERS):
        for source in range(4):
            for token in batch.on_rank(layer, source).tolist():
                left += len({expert // (EXPERTS // 4) for expert in token} - {source})
    assert none["rows_per_token"] == pytest.approx(left / LAYERS / 32)
    assert none["all_to_all_mb"] == pytest.approx(left / LAYERS * 8 * 2 / 1e6)
    assert none["all_gather_mb"] == pytest.approx(32 * 3 * (8 * 2 + 8 * K) / 1e6)


def test_harmoeny_levels_where_it_has_room_and_keeps_every_copy() -> None:
    rng = np.random.default_rng(6)
    for case in range(60):
        ranks, size, spare = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.integers(0, 4))
        experts = ranks * size
        slots = torch.full((ranks, size + spare), -1, dtype=torch.int32)
        slots[:, :size] = torch.arange(experts, dtype=torch.int32).view(ranks, size)
        loads = torch.from_numpy(rng.integers(0, 60, experts) * (rng.random(experts) < 0.7)).int()
        filled, quota, imports = published_ahead.schedule(loads, slots.flatten(), ranks, spare, 1)
        kept = torch.zeros(experts, dtype=torch.int64)
        kept.scatter_add_(0, filled.clamp(min=0).long(), torch.where(filled >= 0, quota, 0).long())
        assert torch.equal(kept, loads.long()) and (quota >= 0).all(), case
        grid = filled.view(ranks, -1)
        assert torch.equal(grid[:, :size], slots[:, :size]) and int((grid[:, size:] >= 0).sum()) == int(
            imports
        )
        assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in grid)
        before, after = (x.view(ranks, -1).sum(1).max() for x in (loads, quota))
        assert after <= before
        if spare >= experts:
            assert after <= -(-int(loads.sum()) // ranks)


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(streams(tmp_path)) == []
    assert "left out: no glm52_domains_a in --traces: bench/traces has" in capsys.readouterr().out
    write_trace(draw(2000, 4), tmp_path / "gptoss20b_decode_mmlu.npz")
    even, sequence = streams(tmp_path)
    assert (even.name, even.fold, even.tokens, even.ranks) == ("gpt-oss-20b", Fold((0,), (1,)), 512, 8)
    assert (even.deal, sequence.deal) == ("even", "sequence")
    assert even.trace.seq_id is None and sequence.trace.seq_id is not None
    (shipped,) = streams(None)
    assert shipped.name == "gpt-oss-20b, shipped cut" and len(shipped.fold.replay) == 7
