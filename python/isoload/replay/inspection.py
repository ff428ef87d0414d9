"""How skewed a trace is by itself: its experts in order on the ranks, no replicas, no policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isoload.trace import Ints, Trace

RANKS = (8, 16, 32)  # on which every inspection says what the skew costs


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
class Imbalance:
    """max/mean rank load of one layer on so many ranks, mean over batches with copies; 0 if none has any.

    in_order  experts in order
    least     what no placement without replicas is below: the rank of the batch's hottest expert has its copies
    """

    in_order: float
    least: float


@dataclass(frozen=True)
class LayerStats:
    """One layer of a trace on R ranks. Plain values only.

    layer_id              the model's own layer number
    expert, rank          largest shares; balanced would be 1/E and 1/R
    expert_max_over_mean  expert.total * E: hottest over mean expert load; E/K where every token chooses it
    skew                  where that lies between 1 (0.0) and E/K (1.0); None if K is not known, or E
    imbalance             rank.total * R: max/mean rank load, all batches as one
    on_ranks              what the skew costs on R ranks, and on each of RANKS that is at most E
    """

    layer_id: int
    expert: LargestShare
    rank: LargestShare
    expert_max_over_mean: float
    skew: float | None
    imbalance: float
    on_ranks: dict[int, Imbalance]


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
    return [
        _layer_stats(layer_id, counts[:, layer], num_ranks, trace.top_k)
        for layer, layer_id in enumerate(trace.layer_ids)
    ]


def _layer_stats(layer_id: int, counts: Ints, num_ranks: int, top_k: int) -> LayerStats:
    experts = counts.shape[1]
    expert = _largest_share(counts)
    ranks = sorted({num_ranks, *(number for number in RANKS if number <= experts)})
    shares = {number: _largest_share(_in_order(counts, number)) for number in ranks}
    max_over_mean, most = expert.total * experts, experts / (top_k or experts)
    return LayerStats(
        layer_id,
        expert,
        shares[num_ranks],
        max_over_mean,
        (max_over_mean - 1) / (most - 1) if most > 1 and expert.total else None,
        shares[num_ranks].total * num_ranks,
        {number: _imbalance(expert, share, number) for number, share in shares.items()},
    )


def _in_order(counts: Ints, num_ranks: int) -> Ints:
    """[batches, ranks with experts] copies, of counts [batches, E]."""
    first_expert = np.arange(0, counts.shape[1], -(-counts.shape[1] // num_ranks))
    found: Ints = np.add.reduceat(counts, first_expert, axis=1)
    return found


def _imbalance(expert: LargestShare, rank: LargestShare, num_ranks: int) -> Imbalance:
    least = [max(1.0, share * num_ranks) for share in expert.per_batch if share]
    return Imbalance(rank.mean * num_ranks, float(np.mean(least)) if least else 0.0)


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
