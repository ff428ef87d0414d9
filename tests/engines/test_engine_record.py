"""EngineRecord: what shadow mode keeps, writes and says, against counts and replays of the same copies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload.analysis.rank_loads import read_rank_loads, read_recorded
from isoload.analysis.server import imbalances
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.engines import record as engine_record
from isoload.engines.record import EngineRecord
from isoload.engines.settings import Settings
from isoload.engines.tables import fill_spare_slots, in_order
from support.host_waits import HostWaits
from support.launches import Launches
from support.told_metrics import Told

EXPERTS, K, RANKS, SIZE, LAYERS = 16, 4, 4, 6, 3
TOPOLOGY = isoload.Topology(RANKS, 2)


def placed(seed: int = 1) -> isoload.Placement:
    counts = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).pow(4) * 1000
    return isoload.place(counts, TOPOLOGY, SIZE)


def settings(folder: Path | None = None, **given: str) -> Settings:
    files = {} if folder is None else {"ISOLOAD_RECORD": str(folder)}
    return Settings.read({"ISOLOAD_MODE": "shadow", "ISOLOAD_RECORD_EVERY": "1"} | files | given)


def make(given: Settings, rank: int = 0, tokens: str = "own", **how: Any) -> EngineRecord:
    tables = placed().slot_to_expert.long()
    made = EngineRecord(
        given, "engine", "a model", rank, tables, EXPERTS, TOPOLOGY, tokens, torch.device("cpu"), **how
    )
    MADE.append(made)
    return made


MADE: list[EngineRecord] = []


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    """Else they would speak when the tests are over."""
    yield
    for made in MADE:
        made.clear()
        made.close()
    MADE.clear()


def draw(seed: int, tokens: int = 20, domain: int = 7) -> Tensor:
    """[T, K] experts, skewed; the domain is that of the skew."""
    skew = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(domain)).pow(4)
    return torch.multinomial(skew.expand(tokens, -1), K, generator=torch.Generator().manual_seed(seed))


def engines_choice(ids: Tensor, layer: int, placement: isoload.Placement) -> Tensor:
    """[T, K] slots: of an expert's replicas by row."""
    slots = torch.empty_like(ids)
    for row, experts in enumerate(ids.tolist()):
        for k, expert in enumerate(experts):
            held = (placement.slot_to_expert[layer] == expert).nonzero().flatten()
            slots[row, k] = held[row % len(held)]
    return slots


def run(
    record: EngineRecord, passes: range, placement: isoload.Placement | None = None, drifts: bool = False
) -> list[list[Tensor]]:
    """[passes][L] ids of what is routed; drifts: every pass is of another domain."""
    found = []
    for number in passes:
        domain = number if drifts else 7
        ids = [draw(100 * number + 10 * layer + record.rank, 20, domain) for layer in range(LAYERS)]
        for layer, rows in enumerate(ids):
            record.add(layer, engines_choice(rows, layer, placement or placed()))
        record.phase = "prefill" if number % 3 == 0 else "decode"
        record.step_ended()
        found.append(ids)
    return found


def counted(ids: list[list[Tensor]]) -> np.ndarray:
    rows = [[torch.bincount(rows.flatten(), minlength=EXPERTS) for rows in of] for of in ids]
    return torch.stack([torch.stack(of) for of in rows]).numpy()


def test_every_rank_writes_what_it_routed_and_the_files_join(tmp_path: Path) -> None:
    records = [make(settings(tmp_path), rank) for rank in range(RANKS)]
    want = np.stack([counted(run(record, range(1, 8))) for record in records])  # [R, B, L, E]
    for record in records:
        record.close()
    assert len(list(tmp_path.iterdir())) == RANKS
    for rank, path in enumerate(sorted(tmp_path.iterdir())):
        with pytest.warns(UserWarning, match="the recording lacks the files of ranks"):
            trace = isoload.read_trace(path, allow_missing_ranks=True)
        assert np.array_equal(trace.counts, want[rank]) and trace.top_k == K
        assert np.array_equal(read_rank_loads(path).counts, want[rank])
    assert np.array_equal(isoload.read_trace(tmp_path).counts, want.sum(0))
    recorded = read_recorded(tmp_path)
    assert np.array_equal(recorded.trace.counts, want.sum(0))
    assert recorded.phases == ("decode", "decode", "prefill", "decode", "decode", "prefill", "decode")
    assert recorded.topology == TOPOLOGY and recorded.left_out == (0, 0) and not recorded.same_tokens
    for batch in range(7):
        assert torch.equal(recorded.placement(batch).slot_to_expert, placed().slot_to_expert)
        assert [int(of[batch].sum()) for of in recorded.sent] == [20 * K * LAYERS] * RANKS


def test_one_pass_of_so_many_is_kept_by_its_number(tmp_path: Path) -> None:
    """A rank that writes in between has the same ones."""
    records = [make(settings(tmp_path, ISOLOAD_RECORD_EVERY="3"), rank) for rank in range(RANKS)]
    for record in records:
        ids = run(record, range(1, 6))
        if record.rank == 2:
            record.flush()
        ids += run(record, range(6, 11))
        record.close()
    last = [counted(ids)[[2, 5, 8]]]
    recorded = read_recorded(tmp_path)
    assert len(list(tmp_path.iterdir())) == RANKS + 1 and recorded.trace.num_batches == 3
    own = [recorded.sent[RANKS - 1][batch] for batch in range(3)]
    table = recorded.tables[0]
    for batch, copies in enumerate(own):
        for layer in range(LAYERS):
            counts = np.bincount(table[layer], weights=copies[layer], minlength=EXPERTS)
            assert np.array_equal(counts, last[0][batch][layer])


def test_full_memory_is_written_and_no_passes_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_record, "KEPT", 4)
    record = make(settings(tmp_path), tokens="same")
    ids = run(record, range(1, 11))
    record.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert np.array_equal(read_recorded(tmp_path).trace.counts, counted(ids))


def test_experts_that_move_begin_a_file(tmp_path: Path) -> None:
    """Behind a pass whose copies still are in the old slots; the pass is counted once."""
    record, after = make(settings(tmp_path), tokens="same"), placed(2)
    ids = run(record, range(1, 3))
    rows = [draw(300 + layer) for layer in range(LAYERS)]
    for layer, of in enumerate(rows):
        record.add(layer, engines_choice(of, layer, placed()))
    record.moved(after.slot_to_expert.long())
    record.step_ended()
    ids += [rows, *run(record, range(4, 6), after)]
    record.close()
    recorded = read_recorded(tmp_path)
    assert np.array_equal(recorded.trace.counts, counted(ids)) and recorded.table_of.tolist() == [
        0,
        0,
        0,
        1,
        1,
    ]
    assert torch.equal(recorded.placement(4).slot_to_expert, after.slot_to_expert)


def test_padding_and_masked_copies_are_not_counted() -> None:
    record = make(settings(ISOLOAD_REPORT_SECONDS="60"))
    slots = torch.tensor([[0, 1], [-1, 3], [4, 5], [6, 7]], dtype=torch.int32)
    record.add(0, slots.to(torch.int16), torch.tensor(2, dtype=torch.int32))
    record.add(1, slots)
    record.step_ended()
    (batch,) = record.recorder.counts()
    assert batch[0].nonzero().flatten().tolist() == [0, 1, 3] and int(batch[1].sum()) == 7


def test_warm_ups_are_forgotten() -> None:
    record = make(settings(ISOLOAD_REPORT_SECONDS="60"))
    record.add(0, torch.tensor([[0, 1]]))
    record.clear()
    record.step_ended()
    assert not record.recorder.counts().any()


def test_figures_are_those_of_a_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line, against isoload.analysis of the tokens themselves on the same placement; before, by hand."""
    record = make(settings(tmp_path, ISOLOAD_REPORT_SECONDS="3600"), tokens="same")
    ids = run(record, range(1, 9))
    with caplog.at_level(logging.INFO, "isoload"):
        record.close()
    for phase in ("prefill", "decode"):
        batches = [b for b in range(8) if ((b + 1) % 3 == 0) == (phase == "prefill")]
        tokens = torch.stack([torch.stack(ids[b], 1) for b in batches]).flatten(0, 1).int().numpy()
        trace = isoload.traces.Trace(
            "t", EXPERTS, topk_ids=tokens, tokens_per_batch=np.array([20] * len(batches))
        )
        how = ReplaySettings(RANKS, 2, SIZE, policies=("exact",))
        (exact,) = replay(trace, how, placement=placed()).policies
        before = []
        for b in batches:
            slots = [engines_choice(rows, layer, placed()) for layer, rows in enumerate(ids[b])]
            loads = [torch.bincount(s.flatten() // SIZE, minlength=RANKS).double() for s in slots]
            before.append([float(of.max() / of.mean()) for of in loads])
        (line,) = [r.getMessage() for r in caplog.records if f"in shadow, {phase}" in r.getMessage()]
        assert f"{len(batches)} passes of {LAYERS} layers; " in line and "alone" not in line
        assert (
            f"imbalance {np.mean(before):.3f} as routed, {exact.imbalance_mean:.3f} as isoload would" in line
        )
        worst = np.mean(before, 0).max()
        assert f"worst {worst:.3f} -> " in line and exact.imbalance_mean < np.mean(before)


def test_metrics_are_those_of_the_files(tmp_path: Path) -> None:
    """By phase and quantile of layers."""
    record = make(settings(tmp_path, ISOLOAD_REPORT_SECONDS="3600"), tokens="same")
    record.metrics = told = Told()
    run(record, range(1, 9))
    record.close()
    held = read_recorded(tmp_path)
    both = [np.stack(of) for of in zip(*(imbalances(held, b) for b in range(8)), strict=True)]
    for phase in ("prefill", "decode"):
        of = [b for b, name in enumerate(held.phases) if name == phase]
        for plan, found in zip(("engine", "isoload"), both, strict=True):
            for part in (0.5, 0.9, 1.0):
                want = np.quantile(found[of].mean(0), part)
                assert told.values["imbalance", phase, plan, str(part)] == pytest.approx(want)
                assert told.values["balancedness", phase, plan, str(part)] == pytest.approx(1 / want)


TRAVELS = {
    "ISOLOAD_SPARE_SLOTS": "1", "ISOLOAD_REPORT_SECONDS": "3600",
    "ISOLOAD_POLICY": "prefill=llep:within=node:threshold=1:min_chunk=1:refill_above=1.02,decode=exact",
}  # fmt: skip


def exact_peak(loads: Tensor, table: Tensor) -> int:
    return int(isoload.plan(loads, isoload.Placement(table.view(1, -1), TOPOLOGY, EXPERTS), 0).peak)


def travelled(table: Tensor, batches: list[Tensor]) -> tuple[int, int, int, list[float], list[float]]:
    """One layer's fills, moves, arrivals on the first rank, and imbalance before and after, in plain loops."""
    table, homes = table.clone(), table.clone().view(RANKS, SIZE)
    homes[:, -1] = -1
    empty = isoload.Placement(homes.view(1, -1), TOPOLOGY, EXPERTS, spare_slots=1)
    fills, moves, arrivals, last, filled = 0, 0, 0, [], []
    for loads in batches:
        how = {"within": "node", "threshold": 1.0, "min_chunk": 1}
        wanted = isoload.plan(loads.int(), empty, 0, "llep", **how).slot_to_expert.view(RANKS, SIZE)[:, -1]
        new = table.clone().view(RANKS, SIZE)
        new[:, -1] = torch.where(wanted >= 0, wanted, new[:, -1])
        before, after = exact_peak(loads.int(), table), exact_peak(loads.int(), new.flatten())
        last.append(before * RANKS / int(loads.sum()))
        if after < before and last[-1] > 1.02:
            changed = new.flatten() != table
            fills, moves = fills + 1, moves + int(changed.sum())
            arrivals, table, before = arrivals + int(changed[:SIZE].sum()), new.flatten(), after
        filled.append(before * RANKS / int(loads.sum()))
    return fills, moves, arrivals, last, filled


@pytest.mark.parametrize("alone", [False, True])
def test_what_would_travel_is_that_of_a_replay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    """Over two reports, between which the fill stays; alone: some expert is in the engine's last slots alone."""
    record = make(settings(tmp_path, **TRAVELS), tokens="same")
    table = (torch.arange(RANKS * SIZE) % EXPERTS).expand(LAYERS, -1).clone()
    if not alone:
        homes = isoload.place(torch.ones(LAYERS, EXPERTS), TOPOLOGY, SIZE, spare_slots=1)
        table = fill_spare_slots(homes, torch.ones(LAYERS, EXPERTS)).long()
    record.moved(table)
    homes = table.view(LAYERS, RANKS, SIZE)[:, :, :-1].flatten(1)
    assert all(set(row.tolist()) == set(range(EXPERTS)) for row in homes) != alone
    record.metrics, record.slot_bytes = Told(), {i: 2**30 * (i + 1) for i in range(LAYERS)}
    at = isoload.Placement(table.int(), TOPOLOGY, EXPERTS)
    with caplog.at_level(logging.INFO, "isoload"):
        ids = run(record, range(1, 31), at, drifts=True)
        record.flush()
        ids += run(record, range(31, 61), at, drifts=True)
        record.close()
    if alone:  # isoload would start with the experts in order
        rows = in_order(table, EXPERTS, TOPOLOGY, 1)
        table = fill_spare_slots(rows, torch.ones(LAYERS, EXPERTS))
    lines = [r.getMessage() for r in caplog.records if "spare slot" in r.getMessage()]
    sums = dict.fromkeys(("fills", "moves", "bytes", "arrivals", "arrived"), 0)
    want = []
    for layer in range(LAYERS):
        batches = [torch.bincount(of[layer].flatten(), minlength=EXPERTS) for of in ids[2::3]]
        assert len(batches) == 20
        want.append(travelled(table[layer].int(), batches))
        fills, moves, arrivals, *_ = want[-1]
        for name, value in zip(
            sums, (fills, moves, moves * (layer + 1), arrivals, arrivals * (layer + 1)), strict=True
        ):
            sums[name] += value
    told = record.metrics.values
    assert sums["moves"] > 3 and sums["arrivals"] > 0
    assert told["fills_total"] == sums["fills"] and told["experts_travelled_total"] == sums["arrivals"]
    assert told["bytes_travelled_total"] == sums["arrived"] * 2**30
    for half, line in zip((slice(0, 10), slice(10, 20)), lines, strict=True):
        last, filled = (np.mean([np.mean(of[i][half]) for of in want]) for i in (3, 4))
        assert "would have travelled in " in line and f" of {10 * LAYERS} batches of a layer; " in line
        assert line.endswith(f"imbalance {last:.3f} over the last fill, {filled:.3f} filled")
    counted_in_lines = [line.split("rank: ")[1].split(" experts (") for line in lines]
    assert sum(int(moves) for moves, _ in counted_in_lines) == sums["moves"]
    assert sum(float(rest.split(" GiB")[0]) for _, rest in counted_in_lines) == sums["bytes"]


def test_what_would_travel_needs_the_copies_of_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    record = make(settings(**TRAVELS))
    run(record, range(1, 4))
    with caplog.at_level(logging.INFO, "isoload"):
        record.close()
    (line,) = [r.getMessage() for r in caplog.records if "spare slot" in r.getMessage()]
    assert "depends on the copies of all ranks: isoload replay RECORD --spare-slots 1" in line


def test_a_line_of_own_tokens_says_whose_they_are(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):  # the first alone speaks
        record = make(settings(ISOLOAD_REPORT_SECONDS="3600"), rank)
        run(record, range(1, 3))
        with caplog.at_level(logging.INFO, "isoload"):
            record.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("this rank's copies alone: isoload report joins all ranks")


def test_phases_by_tokens_where_the_engine_says_none(tmp_path: Path) -> None:
    record = make(settings(tmp_path), tokens="same", decode_tokens=20)
    for tokens in (20, 21, 3):
        record.add(0, engines_choice(draw(tokens, tokens), 0, placed()))
        record.step_ended()
    record.close()
    assert read_recorded(tmp_path).phases == ("decode", "prefill", "decode")


def test_what_is_not_counted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    record = make(settings(ISOLOAD_REPORT_SECONDS="3600"))
    record.step_ended()
    record.close()
    assert "has counted no copy in 1 passes of a model: they are not recorded" in caplog.text


def test_a_folder_that_is_gone_is_said_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    record = make(settings(folder), tokens="same")
    folder.rmdir()
    run(record, range(1, 3))
    record.close()
    assert "the counts of shadow mode are lost" in caplog.text and "there" in caplog.text


@pytest.mark.parametrize("padded", [False, True])
def test_launches_and_no_wait(padded: bool) -> None:
    """On a GPU, per layer: count and add; three more where padding has to be masked. And nothing is exchanged."""
    launches = Launches()
    record = make(settings(ISOLOAD_REPORT_SECONDS="60"))
    with HostWaits(lambda tensor: []) as waits, torch.no_grad(), launches:
        record.recorder = type(record.recorder)(LAYERS, RANKS * SIZE, 4, "cuda")
        slots = torch.empty(4096, 8, dtype=torch.int32, device="cuda")
        valid = torch.empty((), dtype=torch.int32, device="cuda") if padded else None
        launches.clear()
        record.add(1, slots, valid)
        made = [line.split(" ")[0] for line in launches.kernels]
        record.step_ended()
    mask = ["arange", "ge", "masked_fill"] if padded else []
    assert made == [*mask, "count", "add_"] and waits.waits == []
    record._recorded = []
    record.close()
