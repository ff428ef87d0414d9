"""A trace of which most choices follow from those of the layer before."""

from __future__ import annotations

import numpy as np

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
