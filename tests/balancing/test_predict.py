"""Predictors: exact integers, known functions found again, the same choices as a dictionary would give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isoload import ops
from isoload.balancing import prediction
from isoload.balancing.prediction import MOST, UNIT
from isoload.traces import Trace

LAYERS, EXPERTS, K, TOKENS = 4, 8, 2, 400


def make_trace(seed: int = 0, tokens: int = TOKENS) -> Trace:
    """A token's next choices are its last ones turned by one, but for one choice in eight."""
    rng = np.random.default_rng(seed)
    first = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)])
    ids = np.stack([(first + layer) % EXPERTS for layer in range(LAYERS)], axis=1)
    strayed = rng.random(ids.shape) < 1 / 8
    other = (ids.sum(-1, keepdims=True) + 1 + np.zeros_like(ids)) % EXPERTS  # one expert for both
    strayed[..., 1] &= ~strayed[..., 0]
    strayed &= ~(other == ids).any(-1, keepdims=True)
    return Trace("turned", EXPERTS, topk_ids=np.where(strayed, other, ids).astype(np.int32))


def loads_of(trace: Trace, layer: int) -> Tensor:
    """[2, E] of two ranks with half of the tokens each."""
    assert trace.topk_ids is not None
    halves = torch.from_numpy(trace.topk_ids[:, layer]).chunk(2)
    return torch.stack([ops.count(half, EXPERTS).counts for half in halves])


def test_linear_is_exact_in_integers() -> None:
    """Against Python's integers, with weights and loads as large as may be."""
    rng = np.random.default_rng(1)
    weights = rng.integers(-MOST, MOST + 1, (2, EXPERTS, EXPERTS))
    empty = torch.zeros(0, EXPERTS, EXPERTS, dtype=torch.float64)
    linear = prediction.Linear([empty, empty, torch.from_numpy(weights.astype(np.float64))])
    for most in (3, 2**13, 2**27 - 1):
        near = [rng.integers(0, most, (3, EXPERTS)) for _ in range(2)]
        got = linear.predict(2, [torch.from_numpy(x.astype(np.int32)) for x in near])
        for source in range(3):
            for e in range(EXPERTS):
                copies = sum(
                    int(near[d][source, i]) * int(weights[d, i, e]) for d in range(2) for i in range(EXPERTS)
                )
                want = max(0, (copies * 2 + UNIT) // (2 * UNIT))
                assert got is not None and (got[source, e] == want or want >= 2**31)


def test_fit_finds_the_function_that_made_the_choices() -> None:
    linear = prediction.fit(make_trace(1))
    fresh = make_trace(2)
    for layer in range(1, LAYERS):
        near = [loads_of(fresh, layer - 1 - d) for d in range(layer)]
        got, want = linear.predict(layer, near), loads_of(fresh, layer)
        assert got is not None and got.dtype == torch.int32
        assert (got - want).abs().sum() < 0.25 * want.sum()
    assert linear.predict(0, []) is None
    assert min(prediction.accuracy(linear, fresh)) > 0.7


def test_a_prediction_of_sums_is_the_sum_of_predictions() -> None:
    """But for the rounding of each source."""
    linear, trace = prediction.fit(make_trace(1)), make_trace(3)
    near = [loads_of(trace, 1), loads_of(trace, 0)]
    each, total = linear.predict(2, near), linear.predict(2, [x.sum(0, dtype=torch.int32) for x in near])
    assert each is not None and total is not None
    assert (each.sum(0) - total).abs().max() <= 2


def test_last_is_the_batch_before() -> None:
    last = prediction.Last(2)
    assert last.predict(0) is None
    loads = loads_of(make_trace(), 0)
    last.note(1, loads)
    assert last.predict(0) is None and last.predict(1) is loads


def test_path_table_is_a_dictionary_of_what_followed() -> None:
    trace, fresh, depth = make_trace(4), make_trace(5), 2
    table = prediction.tabulate(trace, depth)
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
    table, layer = prediction.tabulate(trace, 2), 2
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


def test_lookahead_runs_the_gate_of_the_layer() -> None:
    rows = torch.randn(5, 3)
    gates = [lambda x, w=w: ((x @ w).topk(K).indices, x) for w in torch.randn(2, 3, EXPERTS)]
    norms = [lambda x: x, lambda x: -x]
    assert torch.equal(prediction.Lookahead(gates).choose(1, rows), gates[1](rows)[0])
    ahead = prediction.Lookahead(gates, norms)
    assert torch.equal(ahead.choose(1, rows), gates[1](-rows)[0])


COUNTS = Trace("counts", 2, top_k=1, counts=np.ones((1, 1, 2), np.int64))
ABSENT = Trace("absent", 2, topk_ids=np.full((3, 1, 1), -1, np.int32))
ZERO = torch.zeros(1, 2, 2, dtype=torch.float64)
REFUSED: dict[str, tuple[Any, str]] = {
    "counts": (lambda: prediction.fit(COUNTS), "trace must have per-token choices .*, counts has counts only"),
    "absent": (lambda: prediction.tabulate(ABSENT), "trace must have a token with all choices .*, absent has none"),
    "depth": (lambda: prediction.fit(make_trace(), 0), "depth must be at least 1, got 0"),
    "table depth": (lambda: prediction.tabulate(make_trace(), 30), r"depth must be so small .* at most 2\^62, got 30"),
    "ridge": (lambda: prediction.fit(make_trace(), ridge=0), "ridge must be above 0, got 0"),
    "no weights": (lambda: prediction.Linear([]), "weights must be of at least one layer, got none"),
    "shape": (lambda: prediction.Linear([ZERO[:, :1]]), r"weights must be float64 \[1, 2, 2\] in layer 0, got"),
    "fractions": (
        lambda: prediction.Linear([ZERO + 0.5]),
        "weights must be integers of at most 2097152 in size, those",
    ),
    "size": (lambda: prediction.Linear([ZERO + MOST + 1]), "weights must be integers of at most 2097152 in size"),
    "layer": (lambda: prediction.Last(2).predict(2), r"layer must be in 0..1, got 2"),
    "earlier": (lambda: prediction.Linear([ZERO]).predict(0, []), "earlier must hold the loads of 1 layers"),
    "experts": (
        lambda: prediction.Linear([ZERO]).predict(0, [torch.zeros(3, dtype=torch.int32)]),
        r"earlier must be int32 loads of 2 experts, got torch.int32 \[3\]",
    ),
    "tokens": (
        lambda: prediction.tabulate(make_trace()).choose(2, torch.zeros(3, 1, K)),
        r"tokens must be \[T, at least 2, K\] for layer 2, got \[3, 1, 2\]",
    ),
    "norms": (lambda: prediction.Lookahead([lambda x: (x, x)], []), "norms must be as many as gates, 1, got 0"),
    "other trace": (
        lambda: prediction.accuracy(prediction.fit(make_trace()), make_trace().select_layers([0, 1])),
        "predictor must be of 2 layers and 8 experts as the trace, got 4 and 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
