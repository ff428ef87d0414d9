"""Figures of a policy, counted from routed slots and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from isoload.topology import Topology

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RoutedBatch:
    """Figures of one batch of routed slots, per layer.

    slot_copies  [L, P]  copies that each slot received
    rows         [L, 3]  rows (distinct token x destination rank): all, to another rank, to another node
    rank_rows    [L, R, R]  rows that source rank sends to rank, those to itself included
    copies       [L, 3]  copies (token x expert): all, to another rank, to another node
    shared       [L, 3]  copies of shared experts: all, to another rank, to another rank that the token's routed
                         experts do not visit
    """

    slot_copies: Ints
    rows: Ints
    rank_rows: Ints
    copies: Ints
    shared: Ints


def count_routed(
    slots: Ints, sources: Ints, topology: Topology, slots_per_rank: int, num_shared: int = 0
) -> RoutedBatch:
    """Counts slots [L, T, K] (-1 = absent) of tokens on source ranks [T]; the last num_shared of K are shared."""
    layers, tokens, _ = slots.shape
    ranks, per_node = topology.num_ranks, topology.ranks_per_node
    num_slots = ranks * slots_per_rank
    slot_copies = np.empty((layers, num_slots), dtype=np.int64)
    rows, copies = (np.empty((layers, 3), dtype=np.int64) for _ in range(2))
    rank_rows = np.empty((layers, ranks, ranks), dtype=np.int64)
    rank_of_column, token = np.arange(ranks), np.arange(tokens)[:, None]
    same_rank = sources[:, None] == rank_of_column  # [T, R]
    same_node = (sources // per_node)[:, None] == rank_of_column // per_node
    from_rank = same_rank.T.astype(np.float64)  # a product of floats is a fast one
    for layer in range(layers):
        slot_copies[layer] = np.bincount(slots[layer].ravel() + 1, minlength=num_slots + 1)[1:]
        column = slots[layer] // slots_per_rank + 1  # absent copies fall into column 0
        sent = np.bincount((token * (ranks + 1) + column).ravel(), minlength=tokens * (ranks + 1))
        sent = sent.reshape(tokens, ranks + 1)[:, 1:]
        for out, amount in ((rows, sent > 0), (copies, sent)):
            out[layer] = amount.sum(), amount[~same_rank].sum(), amount[~same_node].sum()
        rank_rows[layer] = from_rank @ (sent > 0)
    shared = np.stack([_count_shared(layer // slots_per_rank, sources, num_shared) for layer in slots])
    return RoutedBatch(slot_copies, rows, rank_rows, copies, shared)


def _count_shared(ranks: Ints, sources: Ints, num_shared: int) -> Ints:
    """[3] shared copies of one layer, from the ranks [T, K] of all copies (-1 = absent)."""
    routed, shared = np.split(ranks, [ranks.shape[1] - num_shared], axis=1)
    away = (shared >= 0) & (shared != sources[:, None])
    unvisited = away & ~(shared[:, :, None] == routed[:, None, :]).any(-1)
    return np.array([(shared >= 0).sum(), away.sum(), unvisited.sum()])


@dataclass(frozen=True)
class PolicyFigures:
    """One row of a replay. Means are over all (batch, layer) pairs that have copies.

    A rank's load is its copies, or with speeds what they cost; the mean load is that of ranks that all end together.

    imbalance_*          max / mean rank load: mean, 99th percentile (linear interpolation), max
    rank_load_std        standard deviation over ranks / mean rank load, mean
    idle_share           sum of (max - load) over ranks, batches and layers / sum of R * max
    gap_*                max rank load / exact's bound on the same placement - 1: mean, max
    ideal_gap            max rank load / ceil(mean rank load) - 1, mean
    remote_*_rows        rows (distinct token x destination rank) that leave their rank, their node; None where K
                         is not known, nor then their shares
    remote_*_share       the same / all rows
    remote_*_copy_share  copies (token x expert) that leave their rank, their node / all copies
    shared_remote_share  copies of shared experts that leave their rank / all; None without shared experts
    shared_unvisited_share  those that go to a rank where the token has no routed copy / all
    active_experts       slots that received copies, on the rank that has most of them, mean
    plan_us_*            planning time per layer in microseconds: of a call for one layer, and of a call for all
                         layers divided by their number; medians, as a busy machine only raises the tail
    """

    policy: str
    imbalance_mean: float
    imbalance_p99: float
    imbalance_max: float
    rank_load_std: float
    idle_share: float
    gap_mean: float
    gap_max: float
    ideal_gap: float
    remote_rank_rows: int | None
    remote_node_rows: int | None
    remote_rank_share: float | None
    remote_node_share: float | None
    remote_rank_copy_share: float
    remote_node_copy_share: float
    shared_remote_share: float | None
    shared_unvisited_share: float | None
    active_experts: float
    plan_us_median: float
    plan_us_batched: float


@dataclass
class Tally:
    """Collects a policy's routed batches and planning times; :meth:`figures` sums them up."""

    policy: str
    topology: Topology
    counts_rows: bool = True  # False where K is not known: a row is a token's, and there are only copies
    loads: list[Ints] = field(default_factory=list)  # [L, R] of every rank
    means: list[Floats] = field(default_factory=list)  # [L] load of ranks that all end together
    bounds: list[Ints] = field(default_factory=list)  # [L] exact's bound
    active: list[Ints] = field(default_factory=list)  # [L] slots in use on the rank with most
    rows: list[Ints] = field(default_factory=list)  # [L, 3]
    copies: list[Ints] = field(default_factory=list)  # [L, 3]
    shared: list[Ints] = field(default_factory=list)  # [L, 3]
    layer_ns: list[int] = field(default_factory=list)
    batched_ns: list[float] = field(default_factory=list)  # per layer

    def add(self, routed: RoutedBatch, bound: Ints) -> None:
        """Adds one batch; bound [L] is exact's, on the same placement and loads."""
        per_rank, ticks = (
            routed.slot_copies.reshape(len(bound), self.topology.num_ranks, -1),
            self.topology.ticks,
        )
        self.loads.append(per_rank.sum(-1) * (1 if ticks is None else ticks.numpy()))
        self.means.append(per_rank.sum((-1, -2)) / self.topology.copies_per_cost)
        self.active.append((per_rank > 0).sum(-1).max(-1))
        self.bounds.append(bound)
        self.rows.append(routed.rows)
        self.copies.append(routed.copies)
        self.shared.append(routed.shared)

    def figures(self) -> PolicyFigures:
        loads, bound, active = (np.concatenate(part) for part in (self.loads, self.bounds, self.active))
        mean = np.concatenate(self.means)
        used = loads.sum(-1) > 0
        if not used.any():
            raise ValueError("trace must have copies in the batches to replay, got none")
        loads, mean, bound, active = loads[used], mean[used], bound[used], active[used]
        peak = loads.max(-1)
        gap, imbalance = peak / bound - 1, peak / mean
        rows, copies = (np.concatenate(part).sum(0).tolist() for part in (self.rows, self.copies))
        shared = np.concatenate(self.shared).sum(0).tolist()
        return PolicyFigures(
            policy=self.policy,
            imbalance_mean=float(imbalance.mean()),
            imbalance_p99=float(np.percentile(imbalance, 99)),
            imbalance_max=float(imbalance.max()),
            rank_load_std=float((loads.std(-1) / mean).mean()),
            idle_share=float((peak[:, None] - loads).sum() / (loads.shape[1] * peak).sum()),
            gap_mean=float(gap.mean()),
            gap_max=float(gap.max()),
            ideal_gap=float((peak / np.ceil(mean) - 1).mean()),
            remote_rank_rows=rows[1] if self.counts_rows else None,
            remote_node_rows=rows[2] if self.counts_rows else None,
            remote_rank_share=rows[1] / rows[0] if self.counts_rows else None,
            remote_node_share=rows[2] / rows[0] if self.counts_rows else None,
            remote_rank_copy_share=copies[1] / copies[0],
            remote_node_copy_share=copies[2] / copies[0],
            shared_remote_share=shared[1] / shared[0] if shared[0] else None,
            shared_unvisited_share=shared[2] / shared[0] if shared[0] else None,
            active_experts=float(active.mean()),
            plan_us_median=float(np.median(self.layer_ns)) / 1000,
            plan_us_batched=float(np.median(self.batched_ns)) / 1000,
        )
