"""Policy ``waterfill``: shared copies fill the ranks up to one level, given the routed split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from isoload.ops import Candidates
from isoload.placement.placed_layers import HostPlacement, PlacedLayers
from isoload.policies.base import EVEN, Demand, exact_plan
from isoload.policies.even import EvenPolicy
from isoload.policies.plan import Plan
from isoload.policies.shared import SharedPolicy, add_exactly, bound_with_shared, live_bound, total_shared


@dataclass(frozen=True)
class WaterfillPolicy(SharedPolicy):
    """Shared copies fill the ranks up to one level; home keeps what fits, ranks that the token visits come next.

    The integer form of the blog's Waterfill (papers/001): the peak is the least there is for this routed split, and
    no more copies leave home than must.

    Options: routed as in ``shared_local``; candidates: "all" ranks, those of the own "node", or only "visited" ones
    and the source, where what finds no visited rank stays home and the peak is counted from routed slots.
    """

    name = "waterfill"
    candidates: Candidates = "all"

    def check(self, placement: HostPlacement) -> None:
        super().check(placement)
        # else a rank's shared copies would have no candidate that is alive
        topology, live = placement.topology, placement.topology.live_ranks
        if self.candidates == "visited" and len(live) < topology.num_ranks:
            raise ValueError("candidates must be all or node for a topology with dead ranks, got 'visited'")
        nodes = {rank // topology.ranks_per_node for rank in live}
        if self.candidates == "node" and len(nodes) < topology.num_nodes:
            raise ValueError(
                "candidates must be all for a topology with a node without live ranks, got 'node'"
            )

    def joined(self) -> dict[str, Any] | None:
        plain = type(self) is WaterfillPolicy and type(self.routed_policy) is EvenPolicy
        return EVEN if plain and self.candidates == "all" else None

    def split_routed(self, demand: Demand, placed: PlacedLayers) -> Plan:
        """Copies spread evenly need no second split for the bound beside the shared ones."""
        if self.joined() is None:
            return super().split_routed(demand, placed)
        return exact_plan(
            self.routed_policy, demand.routed, placed, pour=total_shared(demand, placed), **EVEN
        )

    def add_shared(self, made: Plan, demand: Demand) -> Plan:
        filled, shared = add_exactly(made, demand, self.candidates)
        if self.joined() is None:
            bound = bound_with_shared(demand, made.placed)
        else:
            bound = live_bound(made.bound, demand, made.placed)
        bound = torch.minimum(bound, filled.peak)
        peak = filled.peak if shared.is_met else None
        return replace(made, policy=self, peak=peak, bound=bound, shared=shared)
