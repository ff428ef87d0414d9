"""PathTable of the benches: the same choices as a dictionary would give; its forecasts; how often it is right."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoload.analysis.batches import Fold, make_batches
from isoload.balancing import prediction
from support.turned_trace import EXPERTS, LAYERS, K, make_trace

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from lib.path_table import PathForecast, accuracy, tabulate


def test_path_table_is_a_dictionary_of_what_followed() -> None:
    trace, fresh, depth = make_trace(4), make_trace(5), 2
    table = tabulate(trace, depth)
    assert trace.topk_ids is not None and fresh.topk_ids is not None
    for layer in range(LAYERS):
        popular = Counter(trace.topk_ids[:, layer].ravel().tolist())
        order = sorted(range(EXPERTS), key=lambda e: (-popular[e], e))
        followed: dict[tuple[int, ...], Counter[int]] = {}
        for token in trace.topk_ids:
            path = tuple(token[max(0, layer - depth) : layer, 0].tolist())
            followed.setdefault(path, Counter()).update(token[layer].tolist())
        near = torch.from_numpy(np.ascontiguousarray(fresh.topk_ids[:, :layer][:, ::-1]))
        got = table.choose(layer, near)
        for token, mine in zip(fresh.topk_ids, got.tolist(), strict=True):
            seen = followed.get(tuple(token[max(0, layer - depth) : layer, 0].tolist()), Counter())
            want = sorted(range(EXPERTS), key=lambda e: (-seen[e], order.index(e)))[:K]
            assert mine == want
        counted = table.predict(layer, near, EXPERTS)
        assert counted.tolist() == np.bincount(got.numpy().ravel(), minlength=EXPERTS).tolist()


def test_path_table_skips_what_is_absent() -> None:
    """A token without choices in the layer before gets none; -1 further back is a path that the table lacks."""
    trace = make_trace(4)
    assert trace.topk_ids is not None
    table, layer = tabulate(trace, 2), 2
    near = torch.from_numpy(np.ascontiguousarray(trace.topk_ids[:60, :layer][:, ::-1]))
    whole, some = table.choose(layer, near), near.clone()
    some[::3, 0] = -1
    some[1::3, 1] = -1
    got = table.choose(layer, some)
    assert (got[::3] == -1).all() and torch.equal(got[2::3], whole[2::3])
    popular = torch.from_numpy(table.tables[layer].popular).int()
    assert torch.equal(got[1::3], popular.expand(20, -1)) and not torch.equal(whole[1::3], got[1::3])
    counted = table.predict(layer, some, EXPERTS)
    assert counted.dtype == torch.int32 and int(counted.sum()) == 40 * K
    assert table.choose(0, near[:, :0]).shape == (60, K)


def test_forecasts_are_tabulated_on_the_calibration_batches_alone() -> None:
    trace, ranks, tokens = make_trace(), 4, 50
    assert trace.topk_ids is not None
    batches, fold = make_batches(trace, tokens), Fold((0, 1, 2), (3, 4, 5))
    forecast = PathForecast(trace, batches, fold, seed=0)
    table = tabulate(replace(trace, topk_ids=trace.topk_ids[: 3 * tokens]))
    pairs = []
    for index in fold.replay:
        batch = batches.source_batch(index, ranks, "contiguous")
        loads = batch.loads(EXPERTS)
        predicted = forecast.of(batch, index, loads, 0)
        for layer in range(1, LAYERS):
            for rank in range(ranks):
                near = torch.stack([batch.on_rank(other, rank) for other in range(layer - 1, -1, -1)], dim=1)
                chosen = table.choose(layer, near).flatten()
                assert torch.equal(predicted[layer, rank], torch.bincount(chosen, minlength=EXPERTS).int())
        assert predicted[1].sum() == loads[1].sum()
        pairs.append((predicted, loads))
    for (_, before), (predicted, _) in pairwise(pairs):
        assert torch.equal(predicted[0], before[0]), "the first layer's loads are those of the batch before"


def test_accuracy_counts_choices_that_were_predicted() -> None:
    fresh = make_trace(2)
    assert min(accuracy(prediction.fit(make_trace(1)), fresh)) > 0.7
    assert fresh.topk_ids is not None
    table, layer = tabulate(make_trace(1), 2), 2
    near = torch.from_numpy(np.ascontiguousarray(fresh.topk_ids[:, :layer][:, ::-1]))
    pairs = zip(fresh.topk_ids[:, layer].tolist(), table.choose(layer, near).tolist(), strict=True)
    right = [len(set(chosen) & set(guessed)) / K for chosen, guessed in pairs]
    assert accuracy(table, fresh)[layer - 1] == pytest.approx(np.mean(right))


REFUSED: dict[str, tuple[Any, str]] = {
    "depth": (lambda: tabulate(make_trace(), 30), r"depth must be so small .* at most 2\^62, got 30"),
    "tokens": (
        lambda: tabulate(make_trace()).choose(2, torch.zeros(3, 1, K)),
        r"tokens must be \[T, at least 2, K\] for layer 2, got \[3, 1, 2\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
