"""Policy ``waterfill_sampled``: every token draws its shared expert's rank, as Waterfill is published."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.placement.placed_layers import HostPlacement
from isoload.policies.base import Demand, Seeded, sample_seed
from isoload.policies.plan import Plan
from isoload.policies.shared import SharedPolicy, bound_with_shared, rank_copies
from isoload.shared_experts import SharedPlan
from isoload.traces import read_trace


@dataclass(frozen=True)
class WaterfillSampledPolicy(Seeded, SharedPolicy):
    """Every token draws its shared expert's rank: the published Waterfill, for comparison.

    Options: rule: "static" and "dynamic" are SGLang's two forms, "blog" is papers/001's formula for visited ranks and
    the own one, "blog_all" for all ranks, "recorded" is "blog" by the rank loads of a recorded trace, scaled to the own
    copies, so that nothing need be exchanged; recorded, the trace's file; routed as in ``shared_local``; seed and step
    (the batch's number) select the random stream of "blog" and what is like it.
    """

    name = "waterfill_sampled"
    rule: Literal["static", "dynamic", "blog", "blog_all", "recorded"] = "static"
    recorded: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rule == "recorded") != (self.recorded is not None):
            raise ValueError(
                f"recorded must be a trace's file with rule recorded alone, got {self.recorded!r}"
            )

    def check(self, placement: HostPlacement) -> None:
        super().check(placement)
        wanted = (placement.num_layers, placement.num_routed)
        if self.recorded is not None and (got := recorded_counts(self.recorded).shape) != wanted:
            raise ValueError(
                f"recorded must be a trace of {wanted} layers and experts, got {got} in {self.recorded}"
            )
        if placement.num_shared > 1:
            raise ValueError(
                f"num_shared must be at most 1 for policy {self.name}, got {placement.num_shared}"
            )
        if len(placement.topology.live_ranks) < placement.topology.num_ranks:
            raise ValueError(
                "topology must have all ranks alive for policy waterfill_sampled, which draws any of them"
            )

    def add_shared(self, made: Plan, demand: Demand) -> Plan:
        assert demand.tokens is not None
        shared = SharedPlan("sample", demand.tokens, None, rank_copies(demand.loads, made))
        bound = bound_with_shared(demand, made.placed)
        return replace(made, policy=self, peak=None, bound=bound, shared=shared)

    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor:
        assert plan.shared is not None and plan.shared.copies is not None
        copies, tokens = plan.shared.copies, plan.shared.tokens
        size = plan.placed.host.slots_per_rank
        if self.recorded is not None:
            parts = plan.placed.memo(self.recorded, partial(rank_parts, path=self.recorded))
            load = (parts * copies.select(0, rank).sum()).to(torch.int32)
            own = torch.zeros_like(tokens)
            own[rank] = tokens[rank]
            return ops.route_shared_sampled(slots, load, own, size, rank, "blog", *sample_seed(plan, rank))
        assert self.rule != "recorded"
        load = copies.select(0, rank) if self.rule == "static" else copies.sum(0, dtype=torch.int32)
        return ops.route_shared_sampled(slots, load, tokens, size, rank, self.rule, *sample_seed(plan, rank))


@lru_cache(maxsize=4)
def recorded_counts(path: str) -> np.ndarray[Any, Any]:
    """[L, E] copies of a trace."""
    counts: np.ndarray[Any, Any] = read_trace(path).batch_counts().sum(0)
    return counts


def rank_parts(host: HostPlacement, layer: int, path: str) -> np.ndarray[Any, Any]:
    """[R] float64 each rank's part of a layer's recorded copies, an expert's spread evenly over its slots."""
    slots, counts = host.arrays[0][layer], recorded_counts(path)[layer]
    held = (slots >= 0) & (slots < host.num_routed)
    each = counts / np.maximum(1, np.bincount(slots[held], minlength=len(counts)))
    per_slot = np.where(held, each[np.where(held, slots, 0)], 0.0)
    parts: np.ndarray[Any, Any] = per_slot.reshape(host.topology.num_ranks, -1).sum(1)
    parts /= max(1, counts.sum())
    return parts
