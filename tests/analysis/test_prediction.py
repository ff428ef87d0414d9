"""Forecasts of a replay: who gets which loads, and that a policy ahead has no others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload.analysis.batches import Fold, SourceBatch, make_batches
from isoload.analysis.prediction import Forecast
from isoload.analysis.simulate import Replay, ReplaySettings, replay
from isoload.balancing.prediction import fit
from isoload.traces import Trace

LAYERS, EXPERTS, K, RANKS, TOKENS = 3, 16, 2, 4, 64


def make_trace(batches: int = 6) -> Trace:
    """Each batch prefers experts of its own; a layer's choices are the layer's before, turned by one."""
    rng = np.random.default_rng(8)
    first = []
    for _ in range(batches):
        shares = rng.dirichlet(np.full(EXPERTS, 0.4)) + 1e-3
        first += [rng.choice(EXPERTS, K, replace=False, p=shares / shares.sum()) for _ in range(TOKENS)]
    ids = np.stack([(np.array(first) + layer) % EXPERTS for layer in range(LAYERS)], axis=1)
    return Trace("turned", EXPERTS, topk_ids=ids.astype(np.int32))


def forecasts(predict: str, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Predicted and true loads of the batches of the second half."""
    trace = make_trace()
    batches, fold = make_batches(trace, TOKENS), Fold((0, 1, 2), (3, 4, 5))
    forecast, pairs = Forecast(predict, trace, batches, fold, seed), []
    for index in fold.replay:
        batch = batches.source_batch(index, RANKS, "contiguous")
        loads = loads_of(batch)
        pairs.append((forecast.of(batch, index, loads, 0), loads))
    return pairs


def loads_of(batch: SourceBatch) -> Tensor:
    rows = [[batch.on_rank(layer, r).flatten() for r in range(RANKS)] for layer in range(LAYERS)]
    return torch.stack(
        [torch.stack([torch.bincount(x, minlength=EXPERTS) for x in row]) for row in rows]
    ).int()


def test_perfect_last_and_none() -> None:
    assert all(torch.equal(*pair) for pair in forecasts("perfect"))
    assert not any(pair[0].any() for pair in forecasts("none"))
    pairs = forecasts("last")
    assert not pairs[0][0].any()
    assert all(torch.equal(now[0], before[1]) for before, now in pairwise(pairs))


def test_linear_is_fitted_on_the_calibration_batches_alone() -> None:
    trace, pairs = make_trace(), forecasts("linear")
    assert trace.topk_ids is not None
    own = fit(replace(trace, topk_ids=trace.topk_ids[: 3 * TOKENS]))
    for predicted, loads in pairs:
        assert torch.equal(predicted[1], own.predict(1, [loads[0]]))
        assert torch.equal(predicted[2], own.predict(2, [loads[1], loads[0]]))
    assert torch.equal(pairs[1][0][0], pairs[0][1][0]), "the first layer's is the last batch's"


def test_popularity_deals_each_source_in_the_calibrations_shares() -> None:
    trace = make_trace()
    assert trace.topk_ids is not None
    seen = trace.topk_ids[: 3 * TOKENS]
    for predicted, loads in forecasts("popularity"):
        for layer, rank in product(range(LAYERS), range(RANKS)):
            share = np.bincount(seen[:, layer].ravel(), minlength=EXPERTS) / seen[:, layer].size
            wanted = int(loads[layer, rank].sum()) * share
            assert np.abs(predicted[layer, rank].numpy() - wanted).max() <= 0.5


def test_a_part_of_the_choices_is_kept() -> None:
    assert all(torch.equal(*pair) for pair in forecasts("1"))
    for predicted, loads in forecasts("0.5"):
        assert torch.equal(predicted.sum(-1), loads.sum(-1)), "no copy is lost"
        kept = torch.minimum(predicted, loads).sum() / loads.sum()
        assert 0.5 <= kept < 0.95
    again, others = forecasts("0.5"), forecasts("0.5", seed=1)
    assert torch.equal(again[0][0], forecasts("0.5")[0][0]) and not torch.equal(again[0][0], others[0][0])


def run(predict: str, *policies: str, shared: int = 0) -> Replay:
    settings = ReplaySettings(
        RANKS, spare_slots=2, slots_per_rank=6 + shared, batch_tokens=TOKENS, placer="trivial",
        predict=predict, policies=policies, shared_experts=shared,
    )  # fmt: skip
    return replay(make_trace(), settings)


def test_better_forecasts_balance_better() -> None:
    policies = ("none", "libra", "hedge")
    found = {
        p: [row.imbalance_mean for row in run(p, *policies).policies] for p in ("perfect", "linear", "none")
    }
    for i in (1, 2):
        assert found["perfect"][i] < found["none"][i] and found["linear"][i] < found["none"][i]
    assert found["none"][1:] == [found["none"][0]] * 2, "nothing is borrowed for no forecast"


@pytest.mark.parametrize("predict", ["0.8", "linear", "popularity"])
def test_with_a_shared_expert(predict: str) -> None:
    found = run(predict, "hedge", "libra", shared=1)
    assert found.batches == 3 and found.settings["predict"] == predict
    assert "predict" not in run("0.8", "exact").settings, "nothing was predicted"


def test_refuses() -> None:
    for text in ("often", "1.5", "nan"):
        with pytest.raises(
            ValueError,
            match="predict must be one of perfect, last, linear, popularity, none or a number",
        ):
            run(text, "exact")
    counts = Trace("counts", 4, top_k=1, counts=np.ones((2, 1, 4), np.int64))
    settings = ReplaySettings(2, spare_slots=1, batch_tokens=8, predict="linear", policies=("hedge",))
    with pytest.raises(
        ValueError, match="predict=linear needs per-token choices, trace counts has counts only"
    ):
        replay(counts, settings)
    placement = isoload.place(
        np.ones((LAYERS, EXPERTS)), isoload.Topology(RANKS), 6, "trivial", spare_slots=2
    )
    for predict in ("linear", "popularity", "0.5"):
        settings = ReplaySettings(
            RANKS, spare_slots=2, batch_tokens=TOKENS, predict=predict, policies=("hedge",)
        )
        with pytest.raises(
            ValueError,
            match=f"predict={predict} needs batches to calibrate on, a given placement leaves none",
        ):
            replay(make_trace(), settings, placement=placement)
    popular = ReplaySettings(2, spare_slots=1, batch_tokens=8, predict="popularity", policies=("hedge",))
    assert replay(counts, popular).batches == 1
