"""Policy ``llep``: least-loaded expert parallelism (papers/003), mended."""

from __future__ import annotations

from dataclasses import dataclass

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.policies.base import Demand
from isoload.policies.spilling import SpillPolicy, plan_spill


@dataclass(frozen=True)
class LlepPolicy(SpillPolicy):
    """Ranks above their capacity lend experts, and send those experts' copies, to less loaded ranks.

    No rank's load passes the largest of plain EP, and none its capacity (and tolerance) unless the plan's telemetry
    says why, see :class:`isoload.ops.Spill`. Rests smaller than min_chunk stay at home within the tolerance.

    Options: capacity (times the mean load), min_chunk (copies), threshold (up to this imbalance plain EP), measure
    (the threshold's: "rank" as the published code, "expert" as the paper's text), tolerance (part of the capacity),
    split_by ("fill" = the copies as lent, "exact" = the least peak over the filled slots).
    """

    name = "llep"
    capacity: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3
    measure: str = "rank"
    tolerance: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000, got {self.tolerance}")

    def spill(self, demand: Demand, placed: PlacedLayers) -> ops.Spill:
        return plan_spill(
            demand,
            placed,
            capacity_factor=self.capacity,
            imbalance_threshold=self.threshold,
            per_expert=self.measure == "expert",
            tolerance=self.tolerance,
            min_chunk=self.min_chunk,
        )


def check_rules(capacity: float, min_chunk: int, threshold: float, measure: str) -> None:
    if not 1 <= capacity <= 1000:
        raise ValueError(f"capacity must be in 1..1000, got {capacity}")
    if not 1 <= min_chunk < 2**31:
        raise ValueError(f"min_chunk must be in 1..2^31-1, got {min_chunk}")
    if not 0 <= threshold <= 1000:
        raise ValueError(f"threshold must be in 0..1000, got {threshold}")
    if measure not in ("rank", "expert"):
        raise ValueError(f"measure must be rank or expert, got {measure!r}")
