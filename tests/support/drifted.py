"""Loads that drifted after placement."""

from __future__ import annotations

import numpy as np

from support.cases import Case, draw_loads, eplb_placement


def drifted(ranks: int, replicas: int, tokens: int, seed: int, skew: float = 0.0) -> Case:
    """A batch of top-8 tokens over 256 Zipf experts whose popularity has drifted since they were placed.

    With a skew, every node of 8 ranks has its own popularity.
    """
    rng = np.random.default_rng([ranks, replicas, tokens, seed])
    wished = rng.permutation(1 / np.arange(1, 257) ** 0.8)
    live = wished * rng.lognormal(0.0, 0.5, 256)
    slots = eplb_placement(rng, ranks, wished, (256 + replicas) // ranks)
    nodes = [
        draw_loads(rng, live * rng.lognormal(0.0, skew, 256), 8, 64 * tokens // ranks)
        for _ in range(ranks // 8)
    ]
    return Case(f"drifted-R{ranks}#{seed}", slots, np.concatenate(nodes))
