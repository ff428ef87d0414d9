"""Loads as the tables' collector made them: even ones, and ones drawn from a power law, whose busiest rank was timed.

Written anew after the collector's scheme; the order of ties and of what rounding leaves over is that which fits the
tables best. Checked once against what TensorRT-LLM's wideep rows record (`rank0_num_tokens`; H200, 256 to 8,192 tokens,
2 to 256 ranks): the mean share of a batch's tokens that reaches the busiest rank is within 0.04 of theirs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
CAP = 0.8  # of the batch's tokens: the most that the power law draws for an expert
DRAWS = 24  # the tables hold means over five draws; their noise stays, ours is small beside it


def even_loads(tokens: int, experts: int, top_k: int) -> Ints:
    """[E] copies where token t goes to every (E/k)th expert from t on; few tokens are spread over all of them."""
    stride = -(-experts // top_k)
    first = np.arange(tokens) % stride if tokens >= stride else np.arange(tokens) * stride // tokens
    counts = np.bincount(first, minlength=stride)
    loads = np.zeros(experts, np.int64)
    for choice in range(top_k):
        np.add.at(loads, (np.arange(stride) + choice * stride) % experts, counts)
    return loads


def even_rows(tokens: int, experts: int, top_k: int, ranks: int) -> float:
    """Distinct tokens on rank 0 under even_loads."""
    stride = -(-experts // top_k)
    chosen = np.arange(stride)[:, None] + np.arange(top_k) * stride
    return tokens * float((chosen // (experts // ranks) == 0).any(1).mean())


def power_law(tokens: int, top_k: int, exponent: float, uniform: NDArray[np.float64]) -> Ints:
    """[D, E] copies from uniform numbers [D, E]: drawn by the inverse of the power law's distribution, scaled to the
    batch and rounded. What rounding leaves over goes to the lowest experts, one each; what is too much is taken from
    the largest."""
    experts, copies, e = uniform.shape[-1], tokens * top_k, 1 - exponent
    least, most = (1.0, CAP * tokens) if copies > experts else (0.01, 2.0)
    drawn = ((most**e - least**e) * uniform + least**e) ** (1 / e)
    loads = np.round(drawn / drawn.sum(-1, keepdims=True) * copies).astype(np.int64)
    for row, left in zip(loads, copies - loads.sum(-1), strict=True):
        np.add.at(row, np.arange(max(left, 0)) % experts, 1)
        for _ in range(-left):
            row[row.argmax()] -= 1
    return loads


@cache
def busiest(tokens: int, experts: int, top_k: int, ranks: int, exponent: float) -> Ints:
    """[D, E/R] copies of the busiest rank's experts in DRAWS draws."""
    random = np.random.default_rng([tokens, experts, top_k, ranks, round(1000 * exponent)])
    loads = power_law(tokens, top_k, exponent, random.random((DRAWS, experts))).reshape(DRAWS, ranks, -1)
    return np.asarray(loads[np.arange(DRAWS), loads.sum(-1).argmax(-1)])


def seeded(tokens: int, experts: int, top_k: int, exponent: float) -> Ints:
    """[E] copies of the fused layer's rows, whose one draw is seeded with 0: of 20,000 seeds tried, that which agrees
    best with the times of its rows."""
    uniform = torch.rand(experts, generator=torch.Generator().manual_seed(0)).double().numpy()
    return np.asarray(power_law(tokens, top_k, exponent, uniform[None])[0])


def rank_rows(loads: Ints, tokens: int, ranks: int) -> NDArray[Any]:
    """[R] distinct tokens on every rank: experts by falling load take the next tokens, round and round."""
    order = np.argsort(-loads, kind="stable")
    ends = np.cumsum(loads[order])
    rank_of = order // (len(loads) // ranks)
    rows = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        edges = np.zeros(tokens + 1, np.int64)
        for end, load in zip(ends[rank_of == rank], loads[order][rank_of == rank], strict=True):
            start = (end - load) % tokens
            stop = start + min(load, tokens)
            np.add.at(edges, [start, min(stop, tokens)], [1, -1])
            if stop > tokens:
                np.add.at(edges, [0, stop - tokens], [1, -1])
        rows[rank] = np.count_nonzero(np.cumsum(edges[:tokens]))
    return rows
