"""Plan: what a policy decided for one batch of one layer, or of all layers (the fast clock)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isoload.placement import PlacedLayers
from isoload.replica_tables import ReplicaTables
from isoload.topology import Topology

if TYPE_CHECKING:
    from isoload.policies.base import Policy


@dataclass(frozen=True, eq=False)
class Plan:
    """Two integer vectors over slots, and the proof of how good they are. Fields may have a leading L.

    slot_to_expert  [P] int32   the placement with its spare slots filled
    quota           [P] int32   copies each slot takes; for every expert they sum to its load. None if sampled
    peak            []  int64   max over ranks of the rank's load (copies; ticks if ranks differ in speed).
                                None if sampled: what sampling did is counted from routed slots
    bound           []  int64   proved lower bound of the peak over all integer quotas of these slots
    tables                      of slot_to_expert
    placed                      the layers of the placement it was made for
    weights         [P] float32 sampled policies only: wished part of each replica
    telemetry       [4] int32   exact splits only: sweeps, augmentations, Newton steps, cut by the budget
    """

    slot_to_expert: Tensor
    quota: Tensor | None
    peak: Tensor | None
    bound: Tensor
    tables: ReplicaTables
    placed: PlacedLayers
    policy: Policy
    weights: Tensor | None = None
    telemetry: Tensor | None = None

    @property
    def topology(self) -> Topology:
        return self.placed.topology

    @property
    def layer(self) -> int | None:
        """Position of the planned layer; None for a plan of all layers."""
        return self.placed.layer

    @property
    def realisation(self) -> str:
        """ "quota": a route meets the plan exactly; "sample": replicas are drawn per copy."""
        return "quota" if self.weights is None else "sample"

    def __getitem__(self, layer: int) -> Plan:
        """The plan of one layer of a batch."""
        if self.layer is not None:
            raise ValueError(f"layer must index a plan of all layers, this one is of layer {self.layer}")

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.select(0, layer)

        return Plan(
            self.slot_to_expert.select(0, layer),
            pick(self.quota),
            pick(self.peak),
            self.bound.select(0, layer),
            self.tables[layer],
            self.placed.host.layer(layer, self.bound.device),
            self.policy,
            pick(self.weights),
            pick(self.telemetry),
        )


def rank_cost(quota: Tensor, topology: Topology) -> Tensor:
    """[..., R] int64 cost of every rank under a quota [..., P]: copies, or ticks if ranks differ in speed."""
    copies = quota.view(*quota.shape[:-1], topology.num_ranks, -1).sum(-1)
    ticks = topology.ticks_on(quota.device)
    return copies if ticks is None else copies * ticks


def plan_errors(plan: Plan, loads: Tensor) -> list[str]:
    """Which of a plan's promises do not hold for loads [E] or [R, E] (leading L as the plan); empty if all do."""
    errors = []
    expert_loads = loads if loads.dim() == plan.slot_to_expert.dim() else loads.sum(-2)
    if plan.quota is None or plan.peak is None:
        return [] if plan.weights is not None else ["weights must be given where quota is not"]
    empty = ~plan.tables.is_replica()
    if (plan.quota < 0).any():
        errors.append("quota must not be negative")
    if (plan.quota[empty] != 0).any():
        errors.append("quota must be 0 in empty slots and in second slots of one expert on one rank")
    routed = torch.zeros(*expert_loads.shape[:-1], plan.tables.num_experts + 1, dtype=torch.int64)
    index = torch.where(plan.slot_to_expert < 0, plan.tables.num_experts, plan.slot_to_expert).long()
    routed.scatter_add_(-1, index.cpu(), plan.quota.long().cpu())
    if not torch.equal(routed[..., :-1], expert_loads.long().cpu()):
        errors.append("quota must conserve tokens: an expert's quotas must sum to its load")
    if not torch.equal(rank_cost(plan.quota, plan.topology).amax(-1), plan.peak):
        errors.append("peak must be the largest rank load")
    if (plan.bound > plan.peak).any():
        errors.append("bound must not exceed peak")
    return errors
