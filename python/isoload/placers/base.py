"""Base class of offline placers, scenarios, and the rank loads of a placement.

A placer is a frozen dataclass whose fields are its options (docs/placers.md has their meanings). A scenario is a
recorded batch with its weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from isoload.checks import check_options
from isoload.traces import Trace, same_layers

Loads = np.ndarray[Any, np.dtype[np.float64]]
Tokens = np.ndarray[Any, np.dtype[np.integer[Any]]]

MAX_SCENARIOS = 64  # planning time is proportional; consecutive batches are merged down to this number
WHOLE = 2**24  # copies of a scaled scenario in a layer, so that sums over slots are exact in float64


@dataclass(frozen=True, eq=False)
class Scenarios:
    """Loads of the batches that a placement is made for."""

    loads: Loads  # [n, L, E] copies; traces are scaled to the same number of copies
    weight: Loads  # [n] sums to 1; traces have equal weights, and so do the batches of a trace
    topk_ids: tuple[Tokens, ...] = ()  # [tokens, L, K] of every trace with per-token choices

    @property
    def num_layers(self) -> int:
        return len(self.loads[0])

    @property
    def num_experts(self) -> int:
        return len(self.loads[0, 0])

    def total(self) -> Loads:
        total: Loads = self.loads.sum(0)
        return total

    def shares(self, shrink: float | None = 0.0) -> Loads:
        """Return [n, L, E] each expert's share of its scenario's copies in a layer; 0 in a scenario without copies.
        `shrink` is the fraction of every scenario that is replaced by the mean of all. None: ten times the counting
        noise, at most 0.2, and 0 below 0.05; ten, because tokens of one text choose similar experts."""
        shares: Loads = self.loads / np.maximum(self.loads.sum(-1, keepdims=True), np.finfo(float).tiny)
        if shrink is None:
            noise = 10 * self.counting_noise(shares)
            shrink = 0.0 if noise < 0.05 else min(noise, 0.2)
        mixed: Loads = shares if not shrink else (1 - shrink) * shares + shrink * self.mean(shares)
        return mixed

    def counting_noise(self, shares: Loads) -> float:
        """Return the fraction of the shares' variance over scenarios that independent draws would cause."""
        copies = np.maximum(self.loads.sum(-1, keepdims=True), 1)
        drawn = (self.mean(shares) / copies).mean(0).sum()
        spread = ((shares - self.mean(shares)) ** 2).sum()
        if len(shares) < 2 or not spread:
            return 0.0
        return float(drawn / (spread / (len(shares) - 1)))

    def mean(self, shares: Loads) -> Loads:
        mean: Loads = (self.weight[:, None, None] * shares).sum(0)
        return mean


def make_scenarios(counts: Any) -> tuple[Scenarios, list[Trace]]:
    """Return the scenarios of counts [L, E] or [batches, L, E], of a trace, or of several traces; and the traces."""
    traces = _traces(counts)
    batches: list[Loads] = [_batches(trace.batch_counts()) for trace in traces] or [_batches(counts)]
    sums = [part.sum() for part in batches]
    if traces and not all(sums):
        raise ValueError(f"counts must not be empty, trace {traces[sums.index(0)].name} has no copies")
    limit = MAX_SCENARIOS // len(batches)
    loads, weight = [], []
    for part, copies in zip(batches, sums, strict=True):
        scale = 1.0 if len(batches) == 1 else max(sums) / copies
        groups = np.array_split(part, min(len(part), limit))
        loads += [scale * group.sum(0) for group in groups]
        weight += [len(group) / len(part) / len(batches) for group in groups]
    tokens = tuple(trace.topk_ids for trace in traces if trace.topk_ids is not None)
    return Scenarios(np.stack(loads), np.array(weight), tokens), traces


def _traces(counts: Any) -> list[Trace]:
    """Return the traces in counts, or none for an array. Traces must have the same layers and experts."""
    inputs = [counts] if isinstance(counts, Trace) else counts
    if not isinstance(inputs, Sequence) or not any(isinstance(trace, Trace) for trace in inputs):
        return []
    traces = list(inputs)
    if not all(isinstance(trace, Trace) for trace in traces):
        raise ValueError(
            "counts must be an array, a trace, or a list of traces only, got a list with other items"
        )
    if len(traces) > MAX_SCENARIOS:
        raise ValueError(f"counts must be at most {MAX_SCENARIOS} traces, got {len(traces)}")
    first = traces[0]
    return [first, *(same_layers(first, trace) for trace in traces[1:])]


def _batches(counts: Any) -> Loads:
    if isinstance(counts, torch.Tensor):
        counts = counts.detach().cpu().double().numpy()
    try:
        loads = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"counts must be numeric, got {type(counts).__name__} ({error})") from None
    if loads.ndim not in (2, 3) or 0 in loads.shape:
        raise ValueError(f"counts must be [L, E] or [batches, L, E] and not empty, got {list(loads.shape)}")
    if (bad := ~((loads >= 0) & (loads < 2**63))).any():
        raise ValueError(f"counts must be at least 0 and below 2^63, got {loads[bad][0]:g}")
    return loads if loads.ndim == 3 else loads[None]


Slots = np.ndarray[Any, np.dtype[np.int32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class LiveRanks:
    """The R live ranks, in order, with their nodes, costs and slots."""

    node: Ints  # [R] int32 node of each rank
    tick: Floats  # [R] cost of one copy on each rank, 1.0 = nominal: 1/speed as :attr:`Topology.ticks` rounds it
    # number of slots for routed experts; None = the placer's budget of replicas decides
    slots_per_rank: int | None
    # [L, R, slots_per_rank] current experts (-1 = none), from which the placer starts
    before: Slots | None = None
    home_rank: Ints | None = None  # [L, E] rank of each expert's home in `before`, of these R; -1 = dead
    # [L, R] slots that have memory on every rank now; None = no bound on each rank. A placer with a budget may move
    # them between layers; see `isoload.placers.craft.moved_slots`.
    capacity: Ints | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.node)


@dataclass(frozen=True, eq=False)
class Placed:
    """Result of a placer."""

    slots: Slots  # [L, R, S] expert in each slot; -1 = absent, after the rank's experts
    # [L, R, S] weights for splitting an expert's load over its replicas; None = equal
    replica_weight: np.ndarray[Any, np.dtype[np.float32]] | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # JSON values for the placement's provenance
    home_rank: Ints | None = None  # [L, E] rank of the home slot; None = that of the lowest slot


@dataclass(frozen=True)
class Placer(ABC):
    """Base of all placers."""

    name: ClassVar[str]
    takes_before: ClassVar[bool] = False  # whether it can start from a placement
    takes_capacity: ClassVar[bool] = False  # whether layers and ranks may have different numbers of slots
    needs_tokens: ClassVar[bool] = False  # whether it needs traces with per-token choices
    uses_tokens: ClassVar[bool] = False  # whether it uses per-token choices if a trace has them
    # Whether the placer selects the number of slots itself, by a budget of replicas.
    has_budget: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        """Place the experts of all layers. The live ranks together have at least one slot for each expert.

        Raises:
            ValueError: options that do not fit the loads or the live ranks.
        """


def slots_of(live_ranks: LiveRanks) -> int:
    assert live_ranks.slots_per_rank is not None
    return live_ranks.slots_per_rank


LEAST = 1e-6  # smallest load of a rank in these weights, relative to the mean


def weights_by_load(slots: Slots, load: Floats, tick: Floats) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return [L, R, S] the mean load over the load of the slot's rank, with loads [L, E] split evenly over replicas.
    This is GRACE-MoE's Equation 3 for any replicas. Sums have a fixed order, so that all machines compute the same
    bits. Weights are equal in layers without loads, and 0 in slots [L, R, S] without an expert."""
    experts = merged(slots)
    layer, there = np.arange(len(slots))[:, None, None], experts >= 0
    replicas = np.zeros(load.shape)
    np.add.at(replicas, (layer, experts.clip(0)), there)
    part = np.where(there, load[layer, experts.clip(0)] / np.maximum(replicas, 1)[layer, experts.clip(0)], 0)
    of_rank = tick * part.cumsum(-1)[..., -1]
    mean = of_rank.cumsum(-1)[..., -1:] / of_rank.shape[-1]
    weight = np.where(mean > 0, mean / np.maximum(np.maximum(of_rank, LEAST * mean), np.finfo(float).tiny), 1)
    return np.where(slots >= 0, weight[..., None], 0).astype(np.float32)


def merged(slots: Slots) -> Slots:
    """Return a copy [L, R, S] with -1 in the second and later slots of an expert on a rank."""
    rows: Slots = slots.copy()
    for j in range(1, rows.shape[2]):
        rows[:, :, j][(rows[:, :, :j] == rows[:, :, j : j + 1]).any(-1)] = -1
    return rows


def rank_loads(loads: Any, slots: Slots) -> Floats:
    """Return [n, L, R] rank loads for loads [n, L, E] split evenly over the replicas in slots [L, R, S]."""
    rows = slots.reshape(len(slots), -1)
    copies = np.stack([np.bincount(row[row >= 0], minlength=loads.shape[2]) for row in rows])
    experts = np.broadcast_to(np.maximum(rows, 0), (len(loads), *rows.shape))
    part = np.where(rows >= 0, np.take_along_axis(loads / copies, experts, 2), 0)
    totals: Floats = part.reshape(*loads.shape[:2], *slots.shape[1:]).sum(-1)
    return totals
