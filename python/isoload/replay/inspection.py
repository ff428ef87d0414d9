"""How skewed a trace is by itself: its experts in order on the ranks, no replicas, no policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from isoload.trace import Ints, Trace

RANKS = (8, 16, 32)  # on which every inspection says what the skew costs


def inspect_trace(trace: Trace, num_ranks: int) -> list[dict[str, Any]]:
    """A row of plain values per layer, as ``isoload inspect --json`` writes it.

    Args:
        trace: with counts, or with tokens: these are counted in the trace's own batches.
        num_ranks: R. Each rank holds ceil(E/R) experts in order, as engines lay them without a plan; where R
            does not divide E the last ranks hold fewer, or none.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    counts = trace.batch_counts()
    return [
        _layer_stats(layer_id, counts[:, layer], num_ranks, trace.top_k)
        for layer, layer_id in enumerate(trace.layer_ids)
    ]


def _layer_stats(layer_id: int, counts: Ints, num_ranks: int, top_k: int) -> dict[str, Any]:
    experts = counts.shape[1]
    expert = _largest_share(counts)
    ranks = sorted({num_ranks, *(number for number in RANKS if number <= experts)})
    shares = {number: _largest_share(_in_order(counts, number)) for number in ranks}
    max_over_mean, most = expert["total"] * experts, experts / (top_k or experts)
    return {
        "layer_id": layer_id,  # the model's own number
        "expert": expert,  # balanced would be 1/E
        "expert_max_over_mean": max_over_mean,  # E/K where every token chooses it
        # Where that lies between 1 (0.0) and E/K (1.0); None if K is not known, or E.
        "skew": (max_over_mean - 1) / (most - 1) if most > 1 and expert["total"] else None,
        "on_ranks": {str(number): _imbalance(expert, share, number) for number, share in shares.items()},
        "rank": shares[num_ranks],  # balanced would be 1/R
        "imbalance": shares[num_ranks]["total"] * num_ranks,  # max/mean rank load, all batches as one
    }


def _in_order(counts: Ints, num_ranks: int) -> Ints:
    """[batches, ranks with experts] copies, of counts [batches, E]."""
    first_expert = np.arange(0, counts.shape[1], -(-counts.shape[1] // num_ranks))
    found: Ints = np.add.reduceat(counts, first_expert, axis=1)
    return found


def _imbalance(expert: dict[str, Any], rank: dict[str, Any], num_ranks: int) -> dict[str, float]:
    """max/mean rank load with experts in order, and the least of any placement without replicas (the rank of a batch's
    hottest expert has its copies); means over batches with copies, 0 if none has any."""
    least = [max(1.0, share * num_ranks) for share in expert["per_batch"] if share]
    return {"in_order": rank["mean"] * num_ranks, "least": float(np.mean(least)) if least else 0.0}


def _largest_share(counts: Ints) -> dict[str, Any]:
    """The largest part of the copies [batches, n] that one expert, or one rank, takes.

    hottest and total are of all batches together (the lowest of equals), mean and max of per_batch over batches with
    copies; per_batch is 0 in a batch without.
    """
    sums, total = counts.sum(1), counts.sum(0)
    shares, hottest = counts.max(1) / np.maximum(sums, 1), int(total.argmax())
    filled = shares[sums > 0] if sums.any() else np.zeros(1)
    return {
        "hottest": hottest,
        "total": float(total[hottest] / max(total.sum(), 1)),
        "mean": float(filled.mean()),
        "max": float(filled.max()),
        "per_batch": shares.tolist(),
    }
