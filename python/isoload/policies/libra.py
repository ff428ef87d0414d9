"""Policy ``libra``: replicas by a forecast, local copies stay, the others are sharded (papers/004)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from isoload import ops
from isoload.policies.base import Demand, Policy, chosen_plan
from isoload.policies.borrowing import EXACT, BorrowPolicy, fill_spare, routed_homes
from isoload.policies.exact import ExactPolicy
from isoload.policies.keeping import split_above_local
from isoload.records.placed_layers import PlacedLayers
from isoload.records.plan import Plan


@dataclass(frozen=True)
class LibraPolicy(BorrowPolicy):
    """Every rank borrows what its tokens choose most, then the busiest ranks' hottest experts go to the least loaded.

    Copies whose expert has a slot on their own rank stay there; the rest is split above them.

    Options: split_by ("sharding" = Algorithm 2, or "exact" = the least peak above what stays), alpha (part of the slots
    for what the rank's tokens choose), tolerance (of the split, relative), slots (most that are filled per rank; None =
    all spare ones).
    """

    name = "libra"
    ahead = True
    keeps_local = True
    needs = "per_source"
    removed: ClassVar[Mapping[str, str]] = {
        "printed": "policy libra_published runs both algorithms as printed in the paper"
    }
    split_by: str = "sharding"
    alpha: float = 0.5
    tolerance: float = 0.0
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_by not in ("sharding", "exact"):
            raise ValueError(f"split_by must be sharding or exact, got {self.split_by!r}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in 0..1, got {self.alpha}")
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000, got {self.tolerance}")

    @property
    def splitter(self) -> Policy:
        return EXACT

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        slots = placed.spare_slots if self.slots is None else self.slots
        # 0.3 of 10 are 3, although the float is a little less.
        local = round(self.alpha * 1_000_000) * slots // 1_000_000
        made = fill_spare(ops.plan_replication, demand, placed, slots, local_slots=local)
        return placed.fill(made.slot_to_expert, telemetry=made.telemetry)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        if self.split_by == "exact":
            made = split_above_local(ExactPolicy(self.tolerance), demand, placed)
            return replace(made, policy=self, telemetry=placed.telemetry)
        quota = ops.shard_tokens(
            demand.loads,
            placed.tables,
            routed_homes(placed),
            demand.at_home,
            alive=placed.alive,
            tolerance=self.tolerance,
        )
        return chosen_plan(self, quota, demand, placed, placed.telemetry)
