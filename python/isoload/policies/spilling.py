"""What the policies that borrow weights have in common: one op fills the spare slots and splits the copies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoload import ops
from isoload.placement import PlacedLayers
from isoload.policies.base import Decision, Demand, Policy, Split, chosen_split
from isoload.policies.exact import ExactPolicy
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class SpillPolicy(Policy, ABC):
    """Base: :meth:`spill` fills the spare slots; the copies go as it says, or as the exact split over these slots.

    Options: split_by, "fill" or "exact".
    """

    borrows = True
    split_by: str = "fill"

    def __post_init__(self) -> None:
        if self.split_by not in ("fill", "exact"):
            raise ValueError(f"split_by must be fill or exact, got {self.split_by!r}")

    @abstractmethod
    def spill(self, demand: Demand, placed: PlacedLayers) -> ops.Spill:
        """Filled slots, quota, level and telemetry, see :class:`isoload.ops.Spill`."""

    def fill(self, demand: Demand, placed: PlacedLayers) -> Tensor:
        return self._checked_spill(demand, placed).slot_to_expert

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        return self._split(self._checked_spill(demand, placed), demand, tables, placed)

    def decide(self, demand: Demand, placed: PlacedLayers) -> Decision:
        """Both at once: the fill and its quota come from the same call."""
        spill = self._checked_spill(demand, placed)
        tables = placed.routed_tables(spill.slot_to_expert)
        return Decision(spill.slot_to_expert, tables, self._split(spill, demand, tables, placed))

    def _checked_spill(self, demand: Demand, placed: PlacedLayers) -> ops.Spill:
        if placed.spare_slots < 1:
            raise ValueError(
                f"spare_slots must be at least 1 for policy {self.name}, got {placed.spare_slots}"
            )
        if placed.topology.speeds is not None:
            raise ValueError(f"speeds must be None for policy {self.name}, which counts copies")
        return self.spill(demand, placed)

    def _split(self, spill: ops.Spill, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        if self.split_by == "exact":
            split = ExactPolicy().split(demand, tables, placed)
        else:
            split = chosen_split(spill.quota, demand, tables, placed)
        return split._replace(telemetry=spill.telemetry)


def plan_spill(demand: Demand, placed: PlacedLayers, **rules: Any) -> ops.Spill:
    """:func:`isoload.ops.plan_spill` of a placement and its topology, by a policy's rules.

    Where experts have replicas it starts from the exact split over them, so that only what they leave is lent.
    """
    start = ops.plan_exact(demand.loads, placed.tables, demand.at_home).quota if placed.replicated else None
    return ops.plan_spill(
        demand.loads,
        placed.slot_to_expert,
        routed_homes(placed),
        placed.topology.num_ranks,
        placed.spare_slots,
        demand.at_home,
        start=start,
        alive=alive(placed),
        ranks_per_node=placed.topology.ranks_per_node,
        **rules,
    )


def check_within(within: str) -> None:
    if within not in ("all", "node"):
        raise ValueError(f"within must be all or node, got {within!r}")


def alive(placed: PlacedLayers) -> Tensor | None:
    """[R] bool ranks that may borrow; None = all."""
    topology = placed.topology
    if topology.alive is None:
        return None
    if "alive" not in placed.cache:
        ranks = torch.tensor(topology.alive, device=placed.home_slot.device)
        if type(ranks) is not Tensor:  # a FakeTensor must not outlive its mode
            return ranks
        placed.cache["alive"] = ranks
    return placed.cache["alive"]


def routed_homes(placed: PlacedLayers) -> Tensor:
    """[..., E] home slots of the routed experts."""
    return placed.home_slot.narrow(-1, 0, placed.host.num_routed)
