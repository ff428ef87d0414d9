"""Dealing: parts become copies and copies become tokens, exactly, and well mixed."""

from fractions import Fraction

import numpy as np

from support.made_routing import close
from workloads import dealing


def test_apportioned_copies_are_less_than_one_off():
    rng = np.random.default_rng(12)
    for _ in range(300):
        weights = rng.choice([0, 1, 3, 10**6, 2**40], rng.integers(1, 30)).tolist()
        weights[0] += 1
        total = int(rng.choice([0, 1, 7, 1000, 2**31 - 1]))
        copies = dealing.apportion(weights, total)
        assert copies.sum() == total and copies.min() >= 0
        assert close(copies, [Fraction(w * total, sum(weights)) for w in weights])


def test_limited_shares_are_one_kth_at_most_and_the_others_keep_their_proportion():
    rng = np.random.default_rng(13)
    for _ in range(300):
        experts = int(rng.integers(1, 20))
        top_k = int(rng.integers(1, experts + 1))
        weights = [int(w) for w in rng.choice([1, 2, 3, 100, 101, 2**40], experts)]
        limited = dealing.limit_shares(weights, top_k)
        shares = [Fraction(w, sum(limited)) for w in limited]
        assert max(shares) <= Fraction(1, top_k)
        # All shares below 1/K were raised by one factor, and the held ones would have passed 1/K with it.
        factors = {share / w for share, w in zip(shares, weights, strict=True) if share * top_k < 1}
        assert len(factors) <= 1
        for factor in factors:
            assert all(
                w * factor * top_k >= 1 for s, w in zip(shares, weights, strict=True) if s * top_k == 1
            )


def mixing_error(ids, num_experts):
    """Mean of (pairs of experts in one token - expected) ** 2 / expected: about 1 if pairs are independent."""
    member = np.zeros((len(ids), num_experts))
    np.put_along_axis(member, ids, 1, axis=1)
    pairs = (member.T @ member)[np.triu_indices(num_experts, 1)]
    return ((pairs - pairs.mean()) ** 2 / pairs.mean()).mean()


def test_dealt_tokens_mix_all_experts(monkeypatch):
    tokens, experts, top_k = 4001, 48, 6
    copies = dealing.even_copies(experts, tokens * top_k)
    assert mixing_error(dealing.deal(copies, tokens, top_k, np.random.default_rng(0)), experts) < 1.2
    monkeypatch.setattr(dealing, "TRADES", 2)
    assert mixing_error(dealing.deal(copies, tokens, top_k, np.random.default_rng(0)), experts) > 5


def test_no_place_in_a_token_is_better_than_another():
    copies = np.array([4000, 3500, 1500, 1500, 1500])
    ids = dealing.deal(copies, 4000, 3, np.random.default_rng(1))
    seen = np.stack([np.bincount(column, minlength=5) for column in ids.T])
    assert (abs(seen - copies / 3) < 5 * np.sqrt(copies / 3)).all()
