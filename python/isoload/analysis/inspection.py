"""Skew of a trace with its experts in order on the ranks, and the gain of a placement's replicas, layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isoload.analysis.judge import Floats, even_imbalance, exact_imbalance
from isoload.placement.placement import Placement
from isoload.placers.base import LiveRanks
from isoload.placers.craft import assign, make_grid
from isoload.placers.eplb import pack_into
from isoload.topology import Topology
from isoload.traces import Ints, Trace

RANKS = (8, 16, 32)  # numbers of ranks for which every inspection shows the imbalance that the skew causes


def inspect_trace(trace: Trace, num_ranks: int) -> list[dict[str, Any]]:
    """Return a row of plain values per layer, as ``isoload inspect --json`` writes it.

    Each of num_ranks holds ceil(E/R) experts in order; if R does not divide E the last ranks hold fewer.
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
    shares = {number: _largest_share(ranks_in_order(counts, number)) for number in ranks}
    max_over_mean, highest = expert["total"] * experts, experts / (top_k or experts)
    return {
        "layer_id": layer_id,  # the model's own number
        "expert": expert,  # 1/E would be balanced
        "expert_max_over_mean": max_over_mean,  # E/K if every token chooses it
        "experts_by_load": _experts_by_load(counts.sum(0)),  # CRAFT's Figure 4
        # Position of that value between 1 (0.0) and E/K (1.0); None if K is unknown, or E.
        "skew": (max_over_mean - 1) / (highest - 1) if highest > 1 and expert["total"] else None,
        "on_ranks": {str(number): _imbalance(expert, share, number) for number, share in shares.items()},
        "rank": shares[num_ranks],  # 1/R would be balanced
        "imbalance": shares[num_ranks]["total"] * num_ranks,  # max/mean rank load, all batches as one
    }


LOAD_BINS = {"to_half": 0.5, "to_1": 1.0, "to_2": 2.0, "to_5": 5.0, "to_10": 10.0, "above_10": np.inf}


def _experts_by_load(total: Ints) -> dict[str, int]:
    """Return the number of experts by load over the mean, from total [E]; CRAFT replicates layers above 10 times."""
    over = total / max(float(total.mean()), 1e-300)
    place = np.searchsorted(list(LOAD_BINS.values()), over)
    return dict(zip(LOAD_BINS, np.bincount(place, minlength=len(LOAD_BINS)).tolist(), strict=True))


def ranks_in_order(counts: Ints, num_ranks: int) -> Ints:
    """Return [..., ranks with experts] copies, from counts [..., E]."""
    first_expert = np.arange(0, counts.shape[-1], -(-counts.shape[-1] // num_ranks))
    totals: Ints = np.add.reduceat(counts, first_expert, axis=-1)
    return totals


def _imbalance(expert: dict[str, Any], rank: dict[str, Any], num_ranks: int) -> dict[str, float]:
    """Return max/mean rank load with experts in order, and the least without replicas, by the hottest expert."""
    least = [max(1.0, share * num_ranks) for share in expert["per_batch"] if share]
    return {"in_order": rank["mean"] * num_ranks, "least": float(np.mean(least)) if least else 0.0}


def _largest_share(counts: Ints) -> dict[str, Any]:
    """Return the largest part of the copies [batches, n] that one expert, or one rank, takes; 0 without copies."""
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


def inspect_placement(trace: Trace, placement: Placement) -> dict[str, Any]:
    """Compare a placement with others of the same ranks on a trace's batches, as ``isoload inspect --json`` writes it.

    This is the view of CRAFT's section 3 (papers/000). Balancedness is mean/max rank load, a mean over batches with
    copies. The placement has the trace's layers, found by their ids, and its experts.
    """
    if placement.num_routed != trace.num_experts:
        raise ValueError(
            f"num_experts must be the placement's {placement.num_routed}, got {trace.num_experts}"
        )
    mine = placement.for_trace(trace)
    counts, experts = trace.batch_counts(), trace.num_experts
    ranks, speeds = mine.topology.live_ranks, mine.topology.speeds
    alive = Topology(len(ranks), speeds=None if speeds is None else tuple(speeds[rank] for rank in ranks))
    live = alive.num_ranks
    if experts < live:
        raise ValueError(f"num_experts must be at least the placement's {live} live ranks, got {experts}")
    total = counts.sum(0).astype(np.float32)
    grid = make_grid(LiveRanks(np.zeros(live, np.int32), np.ones(live), None), experts)
    packed = [_packed(total, counts, experts + number, alive) for number in grid]  # [L] each
    per_rank = -(-experts // live)
    rows = np.full((len(total), live * per_rank), -1)
    rows[:, :experts] = np.arange(experts)
    in_order = _balancedness(even_imbalance(_placement(rows, alive, experts), counts), counts)
    even, exact = (_balancedness(judge(mine, counts), counts) for judge in (even_imbalance, exact_imbalance))
    routed = (mine.arrays[0] >= 0) & (mine.arrays[0] < experts)
    layers = [
        {
            "layer_id": layer_id,  # the model's own number
            # Experts in order, without replicas (CRAFT's Figure 3, the lowest part).
            "in_order": float(in_order[i]),
            "placed": float(packed[0][i]),  # packed by load as EPLB packs, without replicas (the middle part)
            # The placement itself, copies spread evenly over replicas (the upper part).
            "replicated": float(even[i]),
            "exact": float(exact[i]),  # the placement itself, split exactly
            "gain_of_placing": float(packed[0][i] - in_order[i]),
            "gain_of_replicas": float(even[i] - packed[0][i]),
            "replicas": int(routed[i].sum()) - experts,  # slots beyond one for each expert
            "by_replicas": [float(balance[i]) for balance in packed],  # by number of replicas (Figure 6)
        }
        for i, layer_id in enumerate(trace.layer_ids)
    ]
    return {
        "replicas": grid,  # numbers of replicas of a layer that were tried
        "balancedness_by_replicas": [float(balance.mean()) for balance in packed],  # over layers (Figure 5)
        "layers": layers,
    }


def _packed(total: Any, counts: Ints, slots: int, topology: Topology) -> Floats:
    """Return [L] balancedness with `slots` slots per layer, as EPLB fills them for the sum of the batches."""
    alone = assign(np.array([slots]), topology.num_ranks)  # every layer separately
    rows = pack_into(total.astype(np.float32), np.repeat(alone, len(total), axis=0))
    placement = _placement(rows.reshape(len(total), -1), topology, counts.shape[2])
    return _balancedness(even_imbalance(placement, counts), counts)


def _placement(slots: Ints, topology: Topology, experts: int) -> Placement:
    return Placement(torch.from_numpy(slots.astype(np.int32)), topology, experts)


def _balancedness(imbalance: Floats, counts: Ints) -> Floats:
    """Return [L] mean of 1 / imbalance [batches, L] over batches with copies in the layer; 1 if none has any."""
    used = counts.sum(2) > 0
    mean: Floats = np.where(used, 1 / imbalance, 0).sum(0) / np.maximum(used.sum(0), 1)
    return np.where(used.any(0), mean, 1.0)
