"""What a placement's replicas bring, layer by layer: the views of CRAFT's section 3 (arXiv 2603.28768)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isoload.placement import Placement
from isoload.placers.base import Room
from isoload.placers.budget import assign, make_grid
from isoload.placers.eplb import pack_into
from isoload.replay.judge import Floats, Ints, even_imbalance, exact_imbalance
from isoload.topology import Topology
from isoload.trace import Trace


def inspect_placement(trace: Trace, placement: Placement) -> dict[str, Any]:
    """A placement beside others of the same ranks, on a trace's batches, as ``isoload inspect --json`` writes it.

    Balancedness is mean/max rank load, a mean over batches with copies.

    Args:
        trace: L layers of E experts; with tokens they are counted in the trace's own batches.
        placement: of the trace's layers, found by their ids, and of E routed experts.
    """
    if placement.num_routed != trace.num_experts:
        raise ValueError(
            f"num_experts must be the placement's {placement.num_routed}, got {trace.num_experts}"
        )
    mine = placement.with_layers(trace.layer_ids)
    counts, experts = trace.batch_counts(), trace.num_experts
    ranks, speeds = mine.topology.live_ranks, mine.topology.speeds
    alive = Topology(len(ranks), speeds=None if speeds is None else tuple(speeds[rank] for rank in ranks))
    live = alive.num_ranks
    if experts < live:
        raise ValueError(f"num_experts must be at least the placement's {live} live ranks, got {experts}")
    total = counts.sum(0).astype(np.float32)
    grid = make_grid(Room(np.zeros(live, np.int32), np.ones(live), None), experts)
    packed = [_packed(total, counts, experts + number, alive) for number in grid]  # [L] each
    per_rank = -(-experts // live)
    row = np.full(live * per_rank, -1)
    row[:experts] = np.arange(experts)
    in_order = _balancedness(
        even_imbalance(_placement(np.tile(row, (len(total), 1)), alive, experts), counts), counts
    )
    even, exact = (_balancedness(judge(mine, counts), counts) for judge in (even_imbalance, exact_imbalance))
    routed = (mine.arrays[0] >= 0) & (mine.arrays[0] < experts)
    layers = [
        {
            "layer_id": layer_id,  # the model's own number
            "in_order": float(
                in_order[i]
            ),  # experts in order, without replicas (CRAFT's Figure 3, the lowest part)
            "placed": float(packed[0][i]),  # packed by load as EPLB packs, without replicas (the middle part)
            "replicated": float(even[i]),  # the placement itself, replicas sharing alike (the upper part)
            "exact": float(exact[i]),  # the same, split exactly
            "gain_of_placing": float(packed[0][i] - in_order[i]),
            "gain_of_replicas": float(even[i] - packed[0][i]),
            "replicas": int(routed[i].sum()) - experts,  # slots beyond one for each expert
            "by_replicas": [float(found[i]) for found in packed],  # by each number of them (Figure 6)
        }
        for i, layer_id in enumerate(trace.layer_ids)
    ]
    return {
        "replicas": grid,  # the numbers of a layer that were tried
        "balancedness_by_replicas": [float(found.mean()) for found in packed],  # over layers (Figure 5)
        "layers": layers,
    }


def _packed(total: Any, counts: Ints, slots: int, topology: Topology) -> Floats:
    """[L] balancedness with so many slots of a layer, as EPLB fills them for the sum of the batches."""
    alone = assign(np.array([slots]), topology.num_ranks)  # every layer by itself
    rows = pack_into(total.astype(np.float32), np.repeat(alone, len(total), axis=0))
    placement = _placement(rows.reshape(len(total), -1), topology, counts.shape[2])
    return _balancedness(even_imbalance(placement, counts), counts)


def _placement(slots: Ints, topology: Topology, experts: int) -> Placement:
    return Placement(torch.from_numpy(slots.astype(np.int32)), topology, experts)


def _balancedness(imbalance: Floats, counts: Ints) -> Floats:
    """[L] mean of 1 / imbalance [batches, L] over batches with copies in the layer; 1 where none has any."""
    used = counts.sum(2) > 0
    mean: Floats = np.where(used, 1 / imbalance, 0).sum(0) / np.maximum(used.sum(0), 1)
    return np.where(used.any(0), mean, 1.0)
