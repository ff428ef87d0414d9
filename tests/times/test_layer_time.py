"""A layer of dispatch, experts and combine."""

from __future__ import annotations

import numpy as np
import pytest

from isoload.times import AllToAllTime, ExpertTime, LayerTime
from isoload.times.exchanges import Curve

EXPERTS = ExpertTime("mine", "k", "bf16", 8, 8, 5.0, 10.0, 0.5, 0.1, 1.0)


def step(name: str) -> AllToAllTime:
    curve = Curve(20.0, 0.2, 50.0)  # as good as the larger of both
    return AllToAllTime("mine", "k", name, 2, 1, curve, curve)


LAYER = LayerTime(step("dispatch"), EXPERTS, step("combine"))


def test_even_routing_is_the_sum_of_its_parts() -> None:
    copies, rows = np.full((2, 4), 100), np.full(2, 300)
    expected = 2 * 0.2 * 1000 + 5 + 40 + 200 + 30
    assert 1e6 * LAYER.seconds(copies, rows, tokens=1000) == pytest.approx([expected, expected])


def test_the_slowest_rank_and_the_busiest_exchange_count() -> None:
    """Rank 1 computes more, rank 0 receives more."""
    copies, rows = np.array([[10, 10], [100, 100]]), np.array([150, 50])
    low, high = 1e6 * LAYER.seconds(copies, rows, tokens=1000)
    slowest = 5 + 20 + 100 + 5
    assert (low, high) == (pytest.approx(2 * 200 + slowest), pytest.approx(2 * 300 + slowest))


def test_without_exchanges_it_is_the_slowest_rank() -> None:
    copies = np.random.default_rng(0).integers(0, 50, (6, 3, 4))
    rows = copies.sum(-1)
    found = LayerTime(None, EXPERTS, None).seconds(copies, rows)
    assert found.shape == (6, 2) and (found == EXPERTS.seconds(copies, rows).max(-1)[:, None]).all()


def test_batches_lead_and_an_empty_one_takes_the_calls() -> None:
    copies = np.stack([np.full((2, 4), 100), np.zeros((2, 4))])
    found = 1e6 * LAYER.seconds(copies, copies.sum(-1), np.array([1000, 0]))
    assert found.shape == (2, 2) and found[1] == pytest.approx([45, 45])


@pytest.mark.parametrize(("copies", "rows"), [([1, 2], 3), ([[1, 2]], [1, 2]), ([[1], [2]], [[1], [2]])])
def test_shapes_must_fit(copies: list[int], rows: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"^rows must be \[\.\.\., ranks\] and copies \[\.\.\., ranks, slots\], got \["
    ):
        LAYER.seconds(copies, rows)


def test_a_real_layer_of_deepseek_v3_on_8_h200() -> None:
    """Prefill, 4096 tokens a rank: 1.9 ms where even, of which the busiest rank's half again is 0.6 to 1.3."""
    shape = {"hidden": 7168, "top_k": 8, "ranks": 8}
    steps = [
        AllToAllTime.load("h200", "sglang_deepep_normal", name, **shape) for name in ("dispatch", "combine")
    ]
    experts = ExpertTime.load(
        "h200", "sglang_deepep_prefill", hidden=7168, intermediate=2048, dtype="fp8_block"
    )
    layer = LayerTime(steps[0], experts, steps[1])
    copies, rows = np.full((8, 32), 1024), np.full(8, 21504)
    (even, same), (low, high) = layer.seconds(copies, rows, 4096), [0.0, 0.0]
    assert even == same and 3e-3 < even < 6e-3
    copies[3], rows[3] = 1536, 30000
    low, high = layer.seconds(copies, rows, 4096)
    assert even + 0.6e-3 < low < high < even + 3e-3
