"""Figures of a policy, counted only from routed slots."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isoload.placement.placement import Placement
from isoload.policies.plan import Plan
from isoload.times import LayerTime
from isoload.topology import NOMINAL_TICKS, Topology

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RoutedBatch:
    """Figures of one batch of routed slots, per layer."""

    slot_copies: Ints  # [L, P] copies that each slot received
    # [L, 4] rows (distinct token x destination rank): all, to another rank, to another node; then distinct token x
    # other node, the rows between nodes if dispatch is by nodes.
    rows: Ints
    rank_rows: Ints  # [L, R, R] rows that each source rank sends to each rank, itself included
    copies: Ints  # [L, 3] copies (token x expert): all, to another rank, to another node
    shared: Ints  # [L, 3] copies of shared experts: all, to another rank, to one where the token has no routed copy


def count_routed(
    slots: Ints, sources: Ints, topology: Topology, slots_per_rank: int, num_shared: int = 0
) -> RoutedBatch:
    """Count slots [L, T, K] (-1 = absent) of tokens on source ranks [T]; the last num_shared of K are shared."""
    layers, tokens, _ = slots.shape
    ranks, per_node = topology.num_ranks, topology.ranks_per_node
    num_slots = ranks * slots_per_rank
    slot_copies = np.empty((layers, num_slots), dtype=np.int64)
    rows, copies = np.empty((layers, 4), dtype=np.int64), np.empty((layers, 3), dtype=np.int64)
    rank_rows = np.empty((layers, ranks, ranks), dtype=np.int64)
    rank_of_column, token = np.arange(ranks), np.arange(tokens)[:, None]
    same_rank = sources[:, None] == rank_of_column  # [T, R]
    same_node = (sources // per_node)[:, None] == rank_of_column // per_node
    from_rank = same_rank.T.astype(np.float64)  # products of floats are fast
    for layer in range(layers):
        slot_copies[layer] = np.bincount(slots[layer].ravel() + 1, minlength=num_slots + 1)[1:]
        column = slots[layer] // slots_per_rank + 1  # absent copies are in column 0
        sent = np.bincount((token * (ranks + 1) + column).ravel(), minlength=tokens * (ranks + 1))
        sent = sent.reshape(tokens, ranks + 1)[:, 1:]
        for out, amount in ((rows, sent > 0), (copies, sent)):
            out[layer, :3] = amount.sum(), amount[~same_rank].sum(), amount[~same_node].sum()
        nodes = (sent > 0).reshape(tokens, ranks // per_node, per_node).any(-1)
        rows[layer, 3] = (nodes & ~same_node[:, ::per_node]).sum()
        rank_rows[layer] = from_rank @ (sent > 0)
    shared = np.stack([_count_shared(layer // slots_per_rank, sources, num_shared) for layer in slots])
    return RoutedBatch(slot_copies, rows, rank_rows, copies, shared)


def _count_shared(ranks: Ints, sources: Ints, num_shared: int) -> Ints:
    """Return [3] shared copies of one layer, from the ranks [T, K] of all copies (-1 = absent)."""
    routed, shared = np.split(ranks, [ranks.shape[1] - num_shared], axis=1)
    away = (shared >= 0) & (shared != sources[:, None])
    unvisited = away & ~(shared[:, :, None] == routed[:, None, :]).any(-1)
    return np.array([(shared >= 0).sum(), away.sum(), unvisited.sum()])


@dataclass(frozen=True)
class PolicyFigures:
    """One row of a replay. Means are over all (batch, layer) pairs that have copies.

    A rank's load is its copies or, with speeds, their cost; the mean load is then that of ranks that all end together.
    """

    policy: str
    imbalance_mean: float  # max / mean rank load
    imbalance_p99: float  # its 99th percentile, linear interpolation
    imbalance_max: float
    gap_mean: float  # max rank load / exact's bound on the same placement - 1
    gap_max: float
    ideal_gap: float  # max rank load / ceil(mean rank load) - 1, mean
    idle_share: float  # sum of (max - load) over ranks, batches and layers / sum of R * max
    rank_load_std: float  # standard deviation over ranks / mean rank load, mean
    # Rows (distinct token x destination rank) that leave their rank, their node, and these / all rows; None if K is
    # unknown.
    remote_rank_rows: int | None
    remote_node_rows: int | None
    remote_rank_share: float | None
    remote_node_share: float | None
    # Rows that leave their node if dispatch is by nodes (distinct token x other node), and these / all rows as above.
    node_dispatch_rows: int | None
    node_dispatch_share: float | None
    remote_rank_copy_share: float  # copies (token x expert) that leave their rank / all copies
    remote_node_copy_share: float
    # Copies of shared experts that leave their rank / all; None without any.
    shared_remote_share: float | None
    shared_unvisited_share: float | None  # copies to a rank where the token has no routed copy / all
    active_experts: float  # slots that received copies, on the rank with the most, mean
    # Microseconds per layer of a call for one layer, and of one for all layers; medians, because load of the machine
    # only raises the tail.
    plan_us_median: float
    plan_us_batched: float

    def to_json(self) -> dict[str, Any]:
        """Return the row as ``isoload replay --json`` writes it: entries with several figures are objects."""
        nested: dict[str, Any] = {}
        for name, value in asdict(self).items():
            outer, _, inner = name.rpartition("_")
            if outer in ("imbalance", "gap", "plan_us"):
                nested.setdefault(outer, {})[inner] = value
            else:
                nested[name] = value
        return nested


@dataclass
class Tally:
    """Collects a policy's routed batches and planning times; :meth:`figures` sums them up."""

    policy: str
    topology: Topology
    counts_rows: bool = True  # False if K is unknown: there are only copies, because a row is a token's
    loads: list[Ints] = field(default_factory=list)  # [L, R] of every rank
    means: list[Floats] = field(default_factory=list)  # [L] load if all ranks end together
    bounds: list[Ints] = field(default_factory=list)  # [L] exact's bound
    active: list[Ints] = field(default_factory=list)  # [L] slots with copies on the rank with the most
    rows: list[Ints] = field(default_factory=list)  # [L, 4]
    copies: list[Ints] = field(default_factory=list)  # [L, 3]
    shared: list[Ints] = field(default_factory=list)  # [L, 3]
    rank_rows: list[Ints] = field(default_factory=list)  # [R, R] from each rank to each, all layers
    layer_ns: list[int] = field(default_factory=list)
    batched_ns: list[float] = field(default_factory=list)  # per layer

    def add(self, routed: RoutedBatch, bound: Ints) -> None:
        """Add one batch; bound [L] is exact's, on the same placement and loads."""
        per_rank = routed.slot_copies.reshape(len(bound), self.topology.num_ranks, -1)
        ticks = self.topology.ticks
        self.loads.append(per_rank.sum(-1) * (1 if ticks is None else ticks.numpy()))
        self.means.append(per_rank.sum((-1, -2)) / self.topology.copies_per_cost)
        self.active.append((per_rank > 0).sum(-1).max(-1))
        self.bounds.append(bound)
        self.rows.append(routed.rows)
        self.rank_rows.append(routed.rank_rows.sum(0))
        self.copies.append(routed.copies)
        self.shared.append(routed.shared)

    def by_batch(self) -> dict[str, list[list[float | None]]]:
        """Return figures [batches][L]: peak, exact's bound, and peak over the mean load (None without copies)."""
        imbalance: list[list[float | None]] = [
            [float(high / mean) if mean else None for high, mean in zip(loads.max(-1), means, strict=True)]
            for loads, means in zip(self.loads, self.means, strict=True)
        ]
        peak = [loads.max(-1).tolist() for loads in self.loads]
        return {"imbalance": imbalance, "peak": peak, "bound": [bound.tolist() for bound in self.bounds]}

    def figures(self) -> PolicyFigures:
        used = np.concatenate(self.loads).sum(-1) > 0
        if not used.any():
            raise ValueError("trace must have copies in the batches to replay, got none")
        parts = self.loads, self.means, self.bounds, self.active
        loads, mean, bound, active = (np.concatenate(part)[used] for part in parts)
        peak = loads.max(-1)
        gap, imbalance = peak / bound - 1, peak / mean
        sums = (np.concatenate(part).sum(0) for part in (self.rows, self.copies, self.shared))
        rows, copies, shared = (total.tolist() for total in sums)
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
            node_dispatch_rows=rows[3] if self.counts_rows else None,
            node_dispatch_share=rows[3] / rows[0] if self.counts_rows else None,
            remote_rank_copy_share=copies[1] / copies[0],
            remote_node_copy_share=copies[2] / copies[0],
            shared_remote_share=shared[1] / shared[0] if shared[0] else None,
            shared_unvisited_share=shared[2] / shared[0] if shared[0] else None,
            active_experts=float(active.mean()),
            plan_us_median=float(np.median(self.layer_ns)) / 1000,
            plan_us_batched=float(np.median(self.batched_ns)) / 1000,
        )


@dataclass
class TimesTally:
    """Collects the times of a policy's layers by measured times; :meth:`figures` sums them up."""

    layer: LayerTime
    move_us: float  # microseconds in which the weights of one expert reach a rank
    microseconds: list[Floats] = field(default_factory=list)  # [L, 4] experts, exchange from and to, imports
    borrowed: list[Floats] = field(default_factory=list)  # [L, 2] experts, copies that they compute
    copies: list[Floats] = field(default_factory=list)  # [L] of all ranks

    def add(self, plans: list[Plan], routed: RoutedBatch, placement: Placement, num_tokens: int) -> None:
        topology, ranks = placement.topology, placement.topology.num_ranks
        copies = routed.slot_copies.reshape(len(plans), ranks, -1)
        experts, dispatch, combine = self.layer.parts(copies, routed.rank_rows.sum(1), num_tokens / ranks)
        if topology.ticks is not None:
            experts = experts * (topology.ticks / NOMINAL_TICKS).numpy()
        slots = torch.stack([plan.slot_to_expert for plan in plans])
        lending = lent(slots, placement.home_slot, placement.spare_slots, ranks).numpy()
        moves = np.maximum(lending.sum(-1), lending.sum(-2)).max(-1) * self.move_us
        parts = [1e6 * experts.max(-1)[:, None], 1e6 * (dispatch + combine), moves[:, None]]
        self.microseconds.append(np.concatenate(parts, -1))
        spare = copies[..., placement.slots_per_rank - placement.spare_slots :]
        self.borrowed.append(np.stack([lending.sum((-1, -2)), spare.sum((-1, -2))], -1).astype(np.float64))
        self.copies.append(copies.sum((-1, -2)) / ranks)

    def figures(self) -> dict[str, Any]:
        """Return means over all (batch, layer) pairs that have copies; times in microseconds, imports not hidden."""
        parts, borrowed, copies = map(np.concatenate, (self.microseconds, self.borrowed, self.copies))
        experts, low, high, moves = parts[copies > 0].mean(0).tolist()
        lent_experts, moved = borrowed[copies > 0].sum(0)
        return {
            "experts_us": experts,
            "exchange_us_low": low,
            "exchange_us_high": high,
            "import_us": moves,
            "layer_us_low": experts + low + moves,
            "layer_us_high": experts + high + moves,
            "borrowed": float(lent_experts / (copies > 0).sum()),  # experts, of all ranks
            "copies_per_borrowed": float(moved / lent_experts) if lent_experts else None,
            "mean_copies": float(copies[copies > 0].mean()),  # of a rank
        }


def lent(slot_to_expert: Tensor, home_slot: Tensor, spare_slots: int, num_ranks: int) -> Tensor:
    """Return [..., R, R] int64 experts that a rank (row) sends to each rank's spare slots, of slots [..., P]."""
    size = slot_to_expert.shape[-1] // num_ranks
    borrowed = slot_to_expert.reshape(*slot_to_expert.shape[:-1], num_ranks, size)[..., size - spare_slots :]
    lenders = home_slot.gather(-1, borrowed.clamp(min=0).flatten(-2).long()).view(borrowed.shape) // size
    numbers = torch.arange(num_ranks, device=lenders.device).view(num_ranks, 1, 1)
    return ((lenders.unsqueeze(-3) == numbers) & (borrowed >= 0).unsqueeze(-3)).sum(-1)
