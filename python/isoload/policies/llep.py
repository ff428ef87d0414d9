"""Policy ``llep``: least-loaded expert parallelism (papers/003), mended."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload import ops
from isoload.ops import Within
from isoload.policies.base import Demand, Policy
from isoload.policies.borrowing import EXACT, BorrowPolicy, plan_spill
from isoload.records.placed_layers import PlacedLayers
from isoload.records.plan import Plan, rank_cost


@dataclass(frozen=True)
class LlepPolicy(BorrowPolicy):
    """Ranks above their capacity lend experts, and send those experts' copies, to less loaded ranks.

    Starts from the exact split over resident replicas, and lends nothing where that is enough. No rank's load passes
    the largest of that, and none its capacity (and tolerance) unless the plan's telemetry says why, see
    :class:`isoload.ops.Spill`. Beside the plan that lends as if replicas took nothing it has no higher peak, and more
    imports only for a lower peak (an excess below min_chunk is none). Where spare slots run out, the lowest level is
    sought at which they suffice, and the copies go as the exact split over the filled slots.

    Options: capacity (times the mean load), min_chunk (copies: a rank that is above its capacity by less lends nothing;
    a larger excess may leave in smaller chunks), threshold (up to this imbalance nothing moves), measure (the
    threshold's: "rank" as the published code, "expert" as the paper's text), tolerance (part of the capacity; within it
    chunks below min_chunk stay at home too), within ("all", or "node": no expert is borrowed beyond its home's node,
    and capacity and threshold are about the mean of the most loaded node), split_by ("fill" = the copies as lent,
    "exact" = the least peak over the filled slots).
    """

    name = "llep"
    split_by: str | Policy = "fill"
    capacity: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3
    measure: str = "rank"
    tolerance: float = 0.02
    within: Within = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000, got {self.tolerance}")

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        spill = plan_spill(
            demand,
            placed,
            capacity_factor=self.capacity,
            imbalance_threshold=self.threshold,
            per_expert=self.measure == "expert",
            tolerance=self.tolerance,
            min_chunk=self.min_chunk,
            within=self.within,
        )
        return placed.fill(spill.slot_to_expert, spill.quota, spill.telemetry)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        """The copies as lent; where spare slots ran out, the exact split if its peak is lower."""
        if self.split_by != "fill" or placed.quota is None:
            return super().split(demand, placed)
        exact, telemetry = EXACT.split(demand, placed), placed.telemetry
        assert exact.quota is not None and exact.peak is not None and telemetry is not None
        lent = rank_cost(placed.quota, placed.topology, demand.at_home).amax(-1)
        better = (telemetry.select(-1, 4) & ops.NO_SPARE_SLOT > 0) & (exact.peak < lent)
        quota = torch.where(better.unsqueeze(-1), exact.quota, placed.quota)
        return Plan(placed, self, quota, torch.where(better, exact.peak, lent), exact.bound, telemetry)


def check_rules(capacity: float, min_chunk: int, threshold: float, measure: str) -> None:
    if not 1 <= capacity <= 1000:
        raise ValueError(f"capacity must be in 1..1000, got {capacity}")
    if not 1 <= min_chunk < 2**31:
        raise ValueError(f"min_chunk must be in 1..2^31-1, got {min_chunk}")
    if not 0 <= threshold <= 1000:
        raise ValueError(f"threshold must be in 0..1000, got {threshold}")
    if measure not in ("rank", "expert"):
        raise ValueError(f"measure must be rank or expert, got {measure!r}")
