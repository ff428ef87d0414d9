"""Predictors: exact integers, and known functions found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isoload import ops
from isoload.balancing import prediction
from isoload.balancing.prediction import MOST, UNIT
from isoload.traces import Trace
from support.turned_trace import EXPERTS, LAYERS, K, make_trace


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
    "absent": (lambda: prediction.fit(ABSENT), "trace must have a token with all choices .*, absent has none"),
    "depth": (lambda: prediction.fit(make_trace(), 0), "depth must be at least 1, got 0"),
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
    "norms": (lambda: prediction.Lookahead([lambda x: (x, x)], []), "norms must be as many as gates, 1, got 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
