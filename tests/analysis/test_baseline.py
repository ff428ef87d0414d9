"""The row that a replay compares with: experts in order, without replicas."""

import numpy as np
import pytest

import isoload
from isoload.analysis import simulate
from isoload.analysis.batches import make_batches
from isoload.analysis.judge import even_imbalance, without_replicas
from isoload.analysis.simulate import ReplaySettings
from isoload.traces import Trace

LAYERS, EXPERTS, TOP_K, RANKS = 3, 10, 3, 4


def made_trace():
    """Four batches of tokens that prefer the first experts."""
    keys = np.random.default_rng(3).gumbel(size=(40, LAYERS, EXPERTS)) - np.log(np.arange(1, EXPERTS + 1))
    ids = np.argsort(-keys, axis=-1)[..., :TOP_K].astype(np.int32)
    return Trace("made", EXPERTS, topk_ids=ids, tokens_per_batch=np.full(4, 10))


@pytest.mark.parametrize("shared", [0, 1])
def test_the_baseline_is_experts_in_order_at_equal_numbers_without_replicas(shared):
    """E/R slots per rank, nothing planned, whatever the placement of the other rows."""
    trace = made_trace()
    settings = ReplaySettings(
        RANKS,
        slots_per_rank=4 + shared,
        shared_experts=shared,
        policies=(simulate.BASELINE, "exact"),
        calibrate="all",
    )
    baseline, exact = simulate.replay(trace, settings).policies
    assert baseline.policy == "in order, no replicas" and baseline.imbalance_mean > exact.imbalance_mean
    assert baseline.plan_us_median == baseline.plan_us_batched == 0 < exact.plan_us_median
    assert baseline.active_experts <= -(-EXPERTS // RANKS) + shared
    plain = isoload.place(np.ones((LAYERS, EXPERTS)), RANKS, placer="trivial")
    if not shared:  # 3 experts on each rank but the last
        plain = without_replicas(plain)
        assert [int((row >= 0).sum()) for row in plain.slot_to_expert] == [EXPERTS] * LAYERS
        counts = make_batches(trace).counts
        wanted = even_imbalance(plain, counts)[counts.sum(-1) > 0]
        assert baseline.imbalance_mean == pytest.approx(wanted.mean())
        assert baseline.gap_mean > 0, "over the bound of the other rows' placement"
