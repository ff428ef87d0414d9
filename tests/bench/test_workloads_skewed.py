"""Workloads that follow a distribution, and the concentrated one: the loads are those of the law, to the copy."""

import numpy as np
import pytest

from support.made_routing import all_ids, make, total_tokens


@pytest.mark.parametrize("exponent", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("shape", [(8, 256, 8, 300), (3, 37, 2, 50), (4, 64, 4, (0, 9000, 3, 1))], ids=str)
def test_zipf_loads_are_within_a_copy_of_the_law(shape, exponent):
    loads = make("zipf", shape, exponent=exponent, seed=9).expert_loads(0)
    law = np.arange(1.0, shape[1] + 1) ** -exponent
    assert (abs(np.sort(loads)[::-1] - law / law.sum() * total_tokens(shape) * shape[2]) < 1 + 1e-6).all()
    if exponent:
        others = make("zipf", shape, exponent=exponent, seed=10).expert_loads(0)
        assert sorted(others) == sorted(loads) and others.tolist() != loads.tolist()


@pytest.mark.parametrize("exponent", [1.0, 1.5, 4.0, 50.0])
@pytest.mark.parametrize(("experts", "top_k"), [(256, 8), (16, 4), (5, 4), (6, 6)])
def test_clip_holds_shares_at_one_kth_and_keeps_the_other_proportions(experts, top_k, exponent):
    tokens = 10_000
    loads = np.sort(make("zipf", (1, experts, top_k, tokens), exponent=exponent, clip=True).expert_loads(0))[
        ::-1
    ]
    law = np.maximum(np.arange(1.0, experts + 1) ** -exponent, 2.0**-40)
    low, high = 0.0, 2.0**60  # the level at which min(1, level * law) adds up to K copies per token
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(1, level * law).sum() < top_k else (low, level)
    assert (abs(loads - tokens * np.minimum(1, high * law)) < 1 + 1e-6).all()
    assert (loads == tokens).sum() >= (high * law > 1).sum() > 0


@pytest.mark.parametrize("sigma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lognormal_loads_have_the_variance_asked(sigma, seed):
    loads = make("lognormal", (8, 256, 4, 10_000_000 // 8), sigma=sigma, seed=seed).expert_loads(0)
    logs = np.log(loads)
    assert abs(logs.std() - sigma) < 1e-3
    if sigma:  # kurtosis of a normal sample of 256: 3, give or take four standard errors
        assert abs((((logs - logs.mean()) / sigma) ** 4).mean() - 3) < 4 * np.sqrt(24 / 256)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "shape", [(8, 256, 8, 4096), (3, 10, 3, 33), (2, 7, 1, 5), (4, 24, 4, (0, 7, 0, 1))], ids=str
)
def test_maxvio_is_met_to_the_copy_over_its_whole_range(shape, seed):
    mean = total_tokens(shape) * shape[2] / shape[1]
    most = shape[1] / shape[2] - 1
    for maxvio in (0, 0.1, 0.2, 0.5, 1, 0.5 * most, 0.99 * most, most):
        loads = make("maxvio", shape, maxvio=maxvio, seed=seed).expert_loads(0)
        assert abs(loads.max() - (1 + maxvio) * mean) < 1 + 1e-6, maxvio
    assert loads.max() == total_tokens(shape)


def test_drift_starts_from_zipf_and_has_the_spread_asked():
    shape = (8, 256, 4, 1_000_000)
    calm = make("zipf", shape, exponent=0.6, seed=3).expert_loads(0)
    np.testing.assert_array_equal(make("drift", shape, exponent=0.6, drift=0, seed=3).expert_loads(5), calm)
    workload = make("drift", shape, exponent=0.6, drift=0.5, seed=3)
    changes = [np.log(workload.expert_loads(step) / calm) for step in range(4)]
    assert all(abs(change.std() - 0.5) < 1e-3 for change in changes)
    correlation = np.corrcoef(changes)[np.triu_indices(4, 1)]
    assert abs(correlation).max() < 4 / np.sqrt(256)


# Concentrated


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("num_hot", [1, 4, 16])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [4, 8])
def test_a_share_of_the_tokens_goes_into_few_experts(share, num_hot, top_k, repeat):
    tokens = (0, 130, 71)
    workload = make("concentrated", (3, 64, top_k, tokens), share=share, num_hot=num_hot, repeat=repeat)
    ids = all_ids(workload, 2)
    hot_copies = (ids < num_hot).sum(1)
    hot = hot_copies > 0
    assert abs(hot.sum() - share * 201) <= 0.5
    assert (hot_copies[hot] == (top_k if repeat else min(top_k, num_hot))).all()
    loads = np.bincount(ids.ravel(), minlength=64)
    np.testing.assert_array_equal(loads, workload.expert_loads(2))
    for part in (loads[:num_hot], loads[num_hot:]):
        assert part.max() - part.min() <= 1
    distinct = (np.diff(np.sort(ids), axis=1) > 0).all(1)
    assert distinct[~hot].all()
    assert distinct[hot].all() or (repeat and num_hot < top_k)


def test_hot_tokens_are_anywhere_on_all_ranks():
    per_rank = make("concentrated", (4, 16, 2, 200), share=0.5, num_hot=1).topk_ids(0)
    hot = [(ids == 0).any(1) for ids in per_rank]
    assert all(60 < rank.sum() < 140 and 25 < rank[:100].sum() < 75 for rank in hot)


def test_a_repeated_token_sends_all_copies_to_one_hot_expert():
    ids = all_ids(make("concentrated", (1, 8, 3, 10), share=0.5, num_hot=1, repeat=True), 0)
    assert ((ids == 0).all(1)).sum() == 5
