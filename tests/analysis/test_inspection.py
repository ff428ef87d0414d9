"""inspect_trace against figures worked out by hand and by loops."""

import numpy as np
import pytest

from isoload.analysis.inspection import inspect_trace
from isoload.traces import Trace


def counted(counts, **fields):
    counts = np.asarray(counts)
    return Trace("t", counts.shape[-1], counts=counts, **fields)


def test_by_hand():
    trace = counted([[[6, 2, 1, 1]], [[0, 0, 0, 0]], [[1, 0, 2, 7]]], layer_ids=(5,))
    (stats,) = inspect_trace(trace, num_ranks=2)
    assert stats["layer_id"] == 5
    assert stats["expert"]["per_batch"] == [0.6, 0.0, 0.7]
    assert stats["rank"]["per_batch"] == [0.8, 0.0, 0.9]
    assert (stats["expert"]["mean"], stats["expert"]["max"]) == (
        pytest.approx(0.65),
        0.7,
    )  # the empty batch does not count
    assert (stats["rank"]["mean"], stats["rank"]["max"]) == (pytest.approx(0.85), 0.9)
    assert (stats["expert"]["hottest"], stats["expert"]["total"]) == (3, 0.4)
    assert (stats["rank"]["hottest"], stats["rank"]["total"]) == (1, 0.55)
    assert stats["expert_max_over_mean"] == pytest.approx(1.6)
    assert sum(stats["experts_by_load"].values()) == 4 and stats["experts_by_load"]["to_2"] > 0
    assert stats["imbalance"] == pytest.approx(1.1)
    assert stats["skew"] is None, "K is not known"
    assert stats["on_ranks"]["2"]["in_order"] == pytest.approx(1.7)
    assert stats["on_ranks"]["2"]["least"] == pytest.approx((2 * 0.6 + 2 * 0.7) / 2)


@pytest.mark.parametrize("num_ranks", [1, 3, 4, 5, 7, 12, 100])
def test_any_number_of_ranks(num_ranks):
    rng = np.random.default_rng(num_ranks)
    counts = rng.integers(0, 50, (3, 2, 13))
    size = -(-13 // num_ranks)
    for layer, stats in enumerate(inspect_trace(counted(counts), num_ranks)):
        loads = [counts[:, layer, r * size : (r + 1) * size].sum(-1) for r in range(num_ranks)]
        expected = np.max(loads, axis=0) / counts[:, layer].sum(-1)
        assert stats["rank"]["per_batch"] == pytest.approx(list(expected))
        totals = [load.sum() for load in loads]
        assert stats["rank"]["hottest"] == int(np.argmax(totals))
        assert stats["imbalance"] == pytest.approx(max(totals) / np.mean(totals))


def test_skew_is_on_the_scale_of_e_and_k():
    """0 = all experts alike, 1 = every token chooses it: E/K times the mean."""
    chosen_by_all = [4, 2, 1, 1, 0, 0, 0, 0]
    for row, skew in (([1] * 8, 0.0), (chosen_by_all, 1.0), ([5, 3, 3, 3, 2, 2, 1, 1], (2 - 1) / 3)):
        (stats,) = inspect_trace(counted([[row]], top_k=2), 4)
        assert stats["skew"] == pytest.approx(skew)


@pytest.mark.parametrize(
    ("experts", "ranks", "numbers"), [(32, 8, [8, 16, 32]), (20, 4, [4, 8, 16]), (4, 6, [6])]
)
def test_what_the_skew_costs_on_more_ranks(experts, ranks, numbers):
    counts = np.random.default_rng(1).integers(0, 50, (3, 2, experts))
    for layer, stats in enumerate(inspect_trace(counted(counts), ranks)):
        assert list(stats["on_ranks"]) == [str(number) for number in numbers]
        for number in numbers:
            cost = stats["on_ranks"][str(number)]
            size, mean = -(-experts // number), counts[:, layer].sum(1) / number
            loads = np.stack([counts[:, layer, r * size : (r + 1) * size].sum(1) for r in range(number)])
            assert cost["in_order"] == pytest.approx((loads.max(0) / mean).mean())
            assert cost["least"] == pytest.approx(np.maximum(1, counts[:, layer].max(1) / mean).mean())
            assert cost["least"] <= cost["in_order"]


def test_layer_without_copies():
    (stats,) = inspect_trace(counted(np.zeros((2, 1, 4), dtype=int), top_k=2), 2)
    assert stats["expert"]["total"] == stats["rank"]["mean"] == stats["imbalance"] == 0
    assert (
        stats["skew"] is None and stats["on_ranks"]["2"]["least"] == stats["on_ranks"]["2"]["in_order"] == 0
    )


def test_tokens_are_counted_in_their_batches():
    ids = np.array([[[0]], [[0]], [[1]], [[-1]], [[2]]])
    (stats,) = inspect_trace(Trace("t", 4, topk_ids=ids, tokens_per_batch=np.array([3, 2])), 4)
    assert stats["expert"]["per_batch"] == [pytest.approx(2 / 3), 1.0]
    (stats,) = inspect_trace(Trace("t", 4, topk_ids=ids), 4)
    assert stats["expert"]["per_batch"] == [0.5]


def test_num_ranks_below_one():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        inspect_trace(counted([[[1, 2]]]), 0)


def test_experts_are_counted_by_load_over_the_mean():
    """A mean of 10: limits belong to the lower bin; a layer without copies has none above half of the mean."""
    counts = np.zeros((1, 2, 26), dtype=np.int64)
    counts[0, 0, :8] = [5, 6, 10, 20, 21, 50, 100, 48]
    stats = inspect_trace(Trace("made", 26, counts=counts), 2)
    assert counts[0, 0].mean() == 10
    assert stats[0]["experts_by_load"] == {
        "to_half": 19,
        "to_1": 2,
        "to_2": 1,
        "to_5": 3,
        "to_10": 1,
        "above_10": 0,
    }
    assert stats[1]["experts_by_load"]["to_half"] == 26
    counts[0, 0, 6] += 1
    assert inspect_trace(Trace("made", 26, counts=counts), 2)[0]["experts_by_load"]["above_10"] == 1
