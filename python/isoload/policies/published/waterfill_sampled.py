"""Policy ``waterfill_sampled``: every token draws its shared expert's rank, as Waterfill is published."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import SharedRule
from isoload.placement import Placement
from isoload.policies.base import Demand, Seeded, sample_seed
from isoload.policies.shared_base import SharedPolicy, bound_with_shared, rank_copies
from isoload.records import Plan
from isoload.shared_experts import SharedPlan


@dataclass(frozen=True)
class WaterfillSampledPolicy(Seeded, SharedPolicy):
    """Every token draws its shared expert's rank: the published Waterfill, for comparison.

    Options: rule: "static" and "dynamic" are SGLang's two forms, "blog" is papers/001's formula for visited ranks and
    the own one, "blog_all" for all ranks; routed as in ``shared_local``; seed and step (the batch's number) select the
    random stream of both.
    """

    name = "waterfill_sampled"
    rule: SharedRule = "static"

    def check(self, placement: Placement) -> None:
        super().check(placement)
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
        copies = plan.shared.copies
        load = copies.select(0, rank) if self.rule == "static" else copies.sum(0, dtype=torch.int32)
        size, tokens = plan.placed.host.slots_per_rank, plan.shared.tokens
        return ops.route_shared_sampled(slots, load, tokens, size, rank, self.rule, *sample_seed(plan, rank))
