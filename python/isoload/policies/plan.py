"""Plan: what a policy decided for one batch of one layer, or of all layers (the fast clock)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from isoload.ops.tables import ReplicaTables
from isoload.placement.placed_layers import PlacedLayers, pick_layer
from isoload.shared_experts import SharedPlan
from isoload.topology import Topology
from isoload.value_checks import values_readable
from isoload.wording import amount, span, text_table


class Planner(Protocol):
    """What of an :class:`isoload.policies.Policy` its plans are read by."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> str: ...
    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Any) -> Tensor: ...
    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Plan:
    """Two integer vectors over slots, and the proof of how good they are. Fields may have a leading L.

    placed                      the layers of the placement it was made for, with the slots of this batch
    policy                      that made it
    quota           [P] int32   copies each slot takes; for every expert they sum to its load. None if sampled.
                                If only shared experts are sampled: of the routed slots, 0 in the shared ones
    peak            []  int64   max over ranks of the rank's load: copies, or their cost in ticks if it has speeds.
                                None if sampled: what sampling did is counted from routed slots
    bound           []  int64   proved lower bound of the peak over all integer quotas of these slots; shared
                                experts stay home in it unless the policy moves them
    telemetry       [4] int32   exact splits: sweeps, augmentations, Newton steps, cut by the budget; policies that
                                borrow: [5], see isoload.ops.SlotFill
    weights         [P] float32 sampled policies only: wished part of each replica; a source rank may draw with others,
                                see isoload.policies.Seeded.weights_of
    shared                      where shared copies go; None without shared experts
    step                        the batch's number, which selects the random stream of what is sampled; or that number
                                on the device, [] int64, which a captured graph reads anew
    send_counts     [P] int32   routed copies that the rank of the demand sends to each slot, where the split made them
    """

    placed: PlacedLayers
    policy: Planner
    quota: Tensor | None
    peak: Tensor | None
    bound: Tensor
    telemetry: Tensor | None = None
    weights: Tensor | None = None
    shared: SharedPlan | None = None
    step: int | Tensor = 0
    send_counts: Tensor | None = None

    @property
    def slot_to_expert(self) -> Tensor:
        """[P] int32 the expert in each slot, borrowed ones included; -1 = none."""
        return self.placed.slot_to_expert

    @property
    def tables(self) -> ReplicaTables:
        """Of the routed experts in these slots."""
        return self.placed.tables

    @property
    def topology(self) -> Topology:
        return self.placed.topology

    @property
    def layer(self) -> int | None:
        """Position of the planned layer; None for a plan of all layers."""
        return self.placed.layer

    @property
    def realisation(self) -> str:
        """ "quota": a route meets the plan exactly; "sample": what it does is known from routed slots only."""
        drawn = self.weights is not None or (self.shared is not None and not self.shared.is_met)
        return "sample" if drawn else "quota"

    def __repr__(self) -> str:
        """Return one line; the values only of a plan on the CPU.

        To read them from a GPU would make the host wait, and would end the capture of a CUDA graph.
        """
        layers = [] if self.layer is not None else [amount(len(self.slot_to_expert), "layer")]
        parts = [self.policy.name, *layers, amount(self.topology.num_ranks, "rank"), self._summary()]
        return f"Plan({', '.join(parts)})"

    def _summary(self) -> str:
        if self.bound.device.type != "cpu" or not values_readable(self.bound):
            return f"on {self.bound.device}"
        unit = "" if self.topology.ticks is None else " ticks"
        if self.peak is None:
            return f"sampled, bound {span(self.bound.flatten().tolist())}{unit}"
        peak = f"peak {span(self.peak.flatten().tolist())}{unit}"
        if self.peak.equal(self.bound):
            return f"{peak} = bound"
        return f"{peak}, bound {span(self.bound.flatten().tolist())}{unit}"

    def describe(self) -> str:
        """Return the line of :func:`repr` and a table, which reads the plan's tensors: on a GPU the host waits.

        A plan of one layer has a row for each rank: its load (copies, or their cost in ticks where ranks differ in
        speed), the slots that take copies, and the experts in its spare slots. A plan of all layers has a row for each
        layer: peak, bound, and the imbalance (peak over mean load). A sampled plan has no loads.
        """
        if self.quota is None or self.peak is None:
            return repr(self)
        load = rank_cost(self.quota, self.topology).cpu()
        if self.layer is None:
            mean = self.quota.sum(-1).cpu() / self.topology.copies_per_cost
            imbalance = (self.peak.cpu() / mean).nan_to_num(1.0)
            values = (self.peak.tolist(), self.bound.tolist(), imbalance.tolist())
            layer_ids = map(str, self.placed.host.layer_ids)
            rows: list[tuple[object, ...]] = list(zip(layer_ids, *values, strict=True))
            return f"{self!r}\n{text_table(('layer', 'peak', 'bound', 'imbalance'), rows)}"
        shape = self.topology.num_ranks, -1
        used = (self.quota.view(shape) > 0).sum(-1).tolist()
        spare = self.slot_to_expert.view(shape)[
            :, self.placed.host.slots_per_rank - self.placed.spare_slots :
        ]
        borrowed = [" ".join(str(e) for e in row if e >= 0) or "-" for row in spare.tolist()]
        rows = list(zip(range(len(used)), load.tolist(), used, borrowed, strict=True))
        return f"{self!r}\n{text_table(('rank', 'load', 'slots in use', 'borrowed experts'), rows)}"

    def __getitem__(self, layer: int) -> Plan:
        """The plan of one layer of a batch."""
        if self.layer is not None:
            raise ValueError(f"layer must index a plan of all layers, this one is of layer {self.layer}")

        return Plan(
            self.placed[layer],
            self.policy,
            pick_layer(self.quota, layer),
            pick_layer(self.peak, layer),
            self.bound.select(0, layer),
            pick_layer(self.telemetry, layer),
            pick_layer(self.weights, layer),
            None if self.shared is None else self.shared[layer],
            self.step,
        )


def rank_cost(quota: Tensor, topology: Topology, besides: Tensor | None = None) -> Tensor:
    """[..., R] int64 cost of every rank under a quota [..., P]: copies, or ticks if ranks differ in speed.

    besides: [..., R] copies that the ranks carry besides the quota.
    """
    copies = quota.view(*quota.shape[:-1], topology.num_ranks, -1).sum(-1)
    copies = copies if besides is None else copies + besides
    ticks = topology.ticks_on(quota.device)
    return copies if ticks is None else copies * ticks


def plan_errors(plan: Plan, loads: Tensor) -> list[str]:
    """Which guarantees of a plan do not hold for loads [E] or [R, E] (leading L as the plan); empty if all do."""
    errors = []
    expert_loads = loads if loads.dim() == plan.slot_to_expert.dim() else loads.sum(-2)
    if plan.quota is None:
        return [] if plan.weights is not None else ["weights must be given where quota is not"]
    shared = torch.where(plan.slot_to_expert >= plan.tables.num_experts, plan.quota, 0)
    if (plan.quota < 0).any():
        errors.append("quota must not be negative")
    if ((plan.quota - shared)[~plan.tables.is_replica()] != 0).any():
        errors.append("quota must be 0 in empty slots and in second slots of one expert on one rank")
    if plan.realisation == "sample":  # only the routed experts have quotas
        expert_loads = expert_loads.narrow(-1, 0, plan.tables.num_experts)
    num_experts = expert_loads.shape[-1]
    planned = torch.zeros(*expert_loads.shape[:-1], num_experts + 1, dtype=torch.int64)
    outside = (plan.slot_to_expert < 0) | (plan.slot_to_expert >= num_experts)
    index = torch.where(outside, num_experts, plan.slot_to_expert).long()
    planned.scatter_add_(-1, index.cpu(), plan.quota.long().cpu())
    if not torch.equal(planned[..., :-1], expert_loads.long().cpu()):
        errors.append("quota must conserve tokens: an expert's quotas must sum to its load")
    if plan.peak is None:
        return errors
    if not torch.equal(rank_cost(plan.quota, plan.topology).amax(-1), plan.peak):
        errors.append("peak must be the largest rank load")
    if (plan.bound > plan.peak).any():
        errors.append("bound must not exceed peak")
    return errors
