"""How skewed a trace is by itself: its experts in order on the ranks, no replicas, no policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isoload.trace import Ints, Trace

HIGH_SKEW = 10.0  # CRAFT's line (its section 3): above it a layer needs replicas, below it packing suffices


@dataclass(frozen=True)
class LargestShare:
    """The largest part of a layer's copies that one expert, or one rank, takes.

    hottest    which one, all batches together (the lowest of equals)
    total      its share of the copies of all batches together
    mean, max  of per_batch, over batches with copies
    per_batch  [batches] the largest share in each batch, of any expert or rank; 0 in a batch without copies
    """

    hottest: int
    total: float
    mean: float
    max: float
    per_batch: tuple[float, ...]


@dataclass(frozen=True)
class LayerStats:
    """One layer of a trace on R ranks. Plain values only.

    layer_id              the model's own layer number
    expert, rank          largest shares; balanced would be 1/E and 1/R
    expert_max_over_mean  expert.total * E: hottest over mean expert load
    imbalance             rank.total * R: max/mean rank load, all batches as one
    skew                  "high-skew" if expert_max_over_mean > 10, else "low-skew"
    """

    layer_id: int
    expert: LargestShare
    rank: LargestShare
    expert_max_over_mean: float
    imbalance: float
    skew: str


def inspect_trace(trace: Trace, num_ranks: int) -> list[LayerStats]:
    """One record per layer.

    Args:
        trace: with counts, or with tokens: these are counted in the trace's own batches.
        num_ranks: R. Each rank holds ceil(E/R) experts in order, as engines lay them without a plan; where R
            does not divide E the last ranks hold fewer, or none.

    Raises:
        ValueError: num_ranks below 1.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    counts = trace.batch_counts()
    first_expert = np.arange(0, trace.num_experts, -(-trace.num_experts // num_ranks))
    rank_counts = np.add.reduceat(counts, first_expert, axis=2)  # ranks without experts are left out
    return [
        _layer_stats(trace.layer_ids[layer], counts[:, layer], rank_counts[:, layer], num_ranks)
        for layer in range(trace.num_layers)
    ]


def _layer_stats(layer_id: int, counts: Ints, rank_counts: Ints, num_ranks: int) -> LayerStats:
    expert, rank = _largest_share(counts), _largest_share(rank_counts)
    max_over_mean = expert.total * counts.shape[1]
    skew = "high-skew" if max_over_mean > HIGH_SKEW else "low-skew"
    return LayerStats(layer_id, expert, rank, max_over_mean, rank.total * num_ranks, skew)


def _largest_share(counts: Ints) -> LargestShare:
    """Of counts [batches, n]."""
    sums = counts.sum(1)
    shares = counts.max(1) / np.maximum(sums, 1)
    filled = shares[sums > 0]
    if not filled.size:
        return LargestShare(0, 0.0, 0.0, 0.0, tuple(shares.tolist()))
    total = counts.sum(0)
    hottest = int(total.argmax())
    share = float(total[hottest] / total.sum())
    return LargestShare(hottest, share, float(filled.mean()), float(filled.max()), tuple(shares.tolist()))
