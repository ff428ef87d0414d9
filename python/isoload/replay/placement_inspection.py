"""What a placement's replicas bring, layer by layer: the views of CRAFT's section 3 (arXiv 2603.28768)."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class PlacedLayer:
    """One layer on a placement's ranks; balancedness is mean/max rank load, a mean over batches with copies.

    layer_id           the model's own layer number
    replicas           slots beyond one for each expert
    in_order           experts in order, without replicas (CRAFT's Figure 3, the lowest part)
    placed             packed by load as EPLB packs, without replicas (the middle part)
    replicated, exact  the placement itself (the upper part), replicas sharing alike, and split exactly
    gain_of_placing    placed - in_order
    gain_of_replicas   replicated - placed
    by_replicas        balancedness by each number of replicas, chosen and packed as EPLB does (Figure 6)
    """

    layer_id: int
    replicas: int
    in_order: float
    placed: float
    replicated: float
    exact: float
    gain_of_placing: float
    gain_of_replicas: float
    by_replicas: tuple[float, ...]


@dataclass(frozen=True)
class PlacementView:
    """Every layer; replicas are the numbers tried, balancedness their means over layers (Figure 5)."""

    layers: tuple[PlacedLayer, ...]
    replicas: tuple[int, ...]
    balancedness: tuple[float, ...]


def inspect_placement(trace: Trace, placement: Placement) -> PlacementView:
    """A placement beside others of the same ranks, on a trace's batches.

    Args:
        trace: L layers of E experts; with tokens they are counted in the trace's own batches.
        placement: of the trace's layers, found by their ids, and of E routed experts.

    Raises:
        ValueError: naming the argument, the rule and the value.
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
    layers = tuple(
        PlacedLayer(
            layer_id=layer_id,
            replicas=int(routed[i].sum()) - experts,
            in_order=float(in_order[i]),
            placed=float(packed[0][i]),
            replicated=float(even[i]),
            exact=float(exact[i]),
            gain_of_placing=float(packed[0][i] - in_order[i]),
            gain_of_replicas=float(even[i] - packed[0][i]),
            by_replicas=tuple(float(found[i]) for found in packed),
        )
        for i, layer_id in enumerate(trace.layer_ids)
    )
    return PlacementView(layers, tuple(grid), tuple(float(found.mean()) for found in packed))


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
