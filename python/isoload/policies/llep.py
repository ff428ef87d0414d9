"""Policy ``llep``: least-loaded expert parallelism (papers/003), mended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from isoload.ops import Within
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy
from isoload.policies.borrowing import FillPolicy


@dataclass(frozen=True)
class LlepPolicy(FillPolicy):
    """Ranks above their capacity lend experts to less loaded ranks, and the copies are split exactly over all slots.

    Starts from the exact split over resident replicas, and lends nothing where that is enough. No rank's load passes
    the largest of that. Where spare slots run out, higher levels are tried, see :func:`isoload.ops.plan_fill`.

    Options: capacity (times the mean load), min_chunk (copies: a rank that is above its capacity by less lends nothing;
    a larger excess may leave in smaller chunks), threshold (up to this imbalance nothing moves), measure (the
    threshold's: "rank" as the published code, "expert" as the paper's text), within ("all", or "node": no expert is
    borrowed beyond its home's node, and capacity and threshold are about the mean of the most loaded node), split_by
    and refill_above (see :class:`FillPolicy`).
    """

    name = "llep"
    removed: ClassVar[Mapping[str, str]] = {
        "tolerance": "a rank that is above the capacity by less than min_chunk lends nothing"
    }
    split_by: str | Policy = "exact"
    capacity: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3
    measure: str = "rank"
    within: Within = "all"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        filled = self.fill_levels(
            demand,
            placed,
            capacity_factor=self.capacity,
            imbalance_threshold=self.threshold,
            per_expert=self.measure == "expert",
            min_chunk=self.min_chunk,
            within=self.within,
        )
        return self.filled(demand, placed, filled)


def check_rules(capacity: float, min_chunk: int, threshold: float, measure: str) -> None:
    if not 1 <= capacity <= 1000:
        raise ValueError(f"capacity must be in 1..1000, got {capacity}")
    if not 1 <= min_chunk < 2**31:
        raise ValueError(f"min_chunk must be in 1..2^31-1, got {min_chunk}")
    if not 0 <= threshold <= 1000:
        raise ValueError(f"threshold must be in 0..1000, got {threshold}")
    if measure not in ("rank", "expert"):
        raise ValueError(f"measure must be rank or expert, got {measure!r}")
