"""Policy ``shared_local``: shared experts stay on the rank that has the token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from isoload.policies.base import Demand
from isoload.policies.plan import Plan, rank_cost
from isoload.policies.shared import SharedPolicy, bound_with_shared


@dataclass(frozen=True)
class SharedLocalPolicy(SharedPolicy):
    """Shared experts are computed on the rank that has the token (SGLang #20089): what waterfill is compared with.

    Options: routed, the policy that splits the routed experts, any that has a quota.
    """

    name = "shared_local"

    def add_shared(self, made: Plan, demand: Demand) -> Plan:
        assert made.quota is not None
        peak = rank_cost(made.quota, made.topology, demand.at_home).amax(-1)
        bound = torch.minimum(bound_with_shared(demand, made.placed), peak)
        return replace(made, policy=self, peak=peak, bound=bound)
