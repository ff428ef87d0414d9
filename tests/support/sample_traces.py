"""Small traces for tests, and what it means that two are the same."""

import numpy as np

from isoload.traces import Trace

COUNTS, IDS = np.full((2, 3, 5), 4), np.tile(np.arange(2), (20, 3, 1))
FIELDS = ("name", "num_experts", "top_k", "cluster", "layer_ids")
ARRAYS = ("counts", "topk_ids", "tokens_per_batch", "seq_id")


def random_ids(rng, tokens, layers, k, num_experts, absent=0.1):
    """[tokens, layers, k] distinct experts per token, some of them masked."""
    ids = rng.permuted(np.tile(np.arange(num_experts), (tokens, layers, 1)), axis=-1)[..., :k]
    return np.where(rng.random(ids.shape) < absent, -1, ids)


def token_trace(seed=0, tokens=37, layers=3, k=2, num_experts=5, **fields):
    rng = np.random.default_rng(seed)
    ids = random_ids(rng, tokens, layers, k, num_experts)
    return Trace("tokens", num_experts, topk_ids=ids, seq_id=rng.integers(0, 4, tokens), **fields)


def assert_same(a, b):
    for name in FIELDS:
        assert getattr(a, name) == getattr(b, name), name
    for name in ARRAYS:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        if left is not None:
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)
