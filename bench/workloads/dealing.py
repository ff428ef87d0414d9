"""The integers of a workload: weights become copies per expert, copies become tokens with distinct experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from isoload.traces import Ints

TRADES = 10  # each leaves about half of what the order of dealing brought together


def apportion(weights: Sequence[int], total: int) -> Ints:
    """[E] int64 copies that add up to `total`, in proportion to `weights` [E], not all zero.

    The running sum over the experts, heaviest first (ties: lowest id), is rounded to nearest. So every expert
    is less than one copy off its part, and so is every run of neighbours of equal weight, however long.
    """
    order = sorted(range(len(weights)), key=lambda e: -weights[e])
    sums = list(accumulate(weights[e] for e in order))
    ends = [(2 * part * total + sums[-1]) // (2 * sums[-1]) for part in sums]
    copies = np.empty(len(weights), dtype=np.int64)
    copies[order] = np.diff([0, *ends])
    return copies


def even_copies(num_experts: int, total: int, first: int = 0) -> Ints:
    """[E] int64 copies if `total` go round the experts one by one, starting at expert ``first % E``."""
    place = (np.arange(num_experts) - first) % num_experts
    return (total - place + num_experts - 1) // num_experts


def limit_shares(weights: Sequence[int], top_k: int) -> list[int]:
    """[E] weights with the shares above 1/K held at exactly 1/K and the others in their old proportion.

    Args:
        weights: [E] positive, E >= K.
        top_k: K.
    """
    falling = sorted(weights, reverse=True)
    rest, held = sum(weights), 0
    while falling[held] * (top_k - held) > rest:
        rest, held = rest - falling[held], held + 1
    return [rest if w > falling[held] else w * (top_k - held) for w in weights]


def deal(copies: Ints, num_tokens: int, top_k: int, stream: np.random.Generator) -> Ints:
    """[T, K] int64 tokens with K distinct experts each, expert e in exactly ``copies[e]`` of them.

    The copies are laid end to end and dealt like cards, one to each token, K times round: no expert has more
    than T copies, so none comes round to a token twice. Random pairs of tokens then exchange experts, which keeps
    both properties; without that, tokens would have the same few neighbours in common.
    (:func:`isoload.analysis.batches.draw_topk_ids` draws every token by itself: its counts are right on average only.)

    Args:
        copies: [E] int64, none above T, sum T * K.
        num_tokens: T.
        top_k: K.
        stream: the random numbers.
    """
    assert copies.sum() == num_tokens * top_k and copies.max(initial=0) <= num_tokens
    order = stream.permutation(len(copies)).astype(np.int64)
    topk_ids: Ints = np.repeat(order, copies[order]).reshape(top_k, num_tokens).T
    for _ in range(TRADES):
        topk_ids = _trade(stream.permutation(topk_ids), stream)
    return stream.permuted(topk_ids, axis=1)  # an exchange leaves them sorted by key


def _trade(topk_ids: Ints, stream: np.random.Generator) -> Ints:
    """Token i of the first half and token i of the second pool their experts and each draw K of them anew.

    An expert of both must go to both: of its two copies one gets a key below all others, one a key above. The
    K lowest keys, in random order but for that, are then the first token's.
    """
    half, top_k = len(topk_ids) // 2, topk_ids.shape[1]
    pool = np.sort(np.concatenate([topk_ids[:half], topk_ids[half : 2 * half]], axis=1), axis=1)
    key = stream.integers(1 << 30, size=pool.shape)
    twin = (pool[:, 1:] == pool[:, :-1]).astype(np.int64) << 30
    key[:, :-1] -= twin
    key[:, 1:] += twin
    # Key and expert in one integer: equal ones are the same expert, so any sort gives the same tokens.
    pool = np.sort(key << 32 | pool, axis=1) & 0xFFFFFFFF
    return np.concatenate([pool[:, :top_k], pool[:, top_k:], topk_ids[2 * half :]])
