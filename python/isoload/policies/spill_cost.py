"""Policy ``spill_cost``: borrows an expert only where computing its tokens elsewhere saves more than the transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from isoload.ops import Within
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy
from isoload.policies.borrowing import FillPolicy
from isoload.times.cost import DEEPSEEK_V3_FP8, DEFAULT_BANDWIDTHS, break_even


@dataclass(frozen=True)
class SpillCostPolicy(FillPolicy):
    """The cheapest of several levels of the largest load, where imports and exports have a price.

    A level costs its largest load, the imports of the busiest importer and the exports of the busiest exporter. An
    import or export costs as many copies as could be computed in its time (:func:`isoload.times.cost.break_even`), by the
    topology's bandwidths, or DEFAULT_BANDWIDTHS if it has none; no expert moves with fewer copies. Starts from the
    exact split over resident replicas; no rank's load passes the largest of that.

    Options: expert_bytes (weights of one expert), token_us (microseconds per copy in a large GEMM), min_chunk (copies;
    a rank that is above a level by less lends nothing), within ("all" or "node", beyond which no expert is borrowed),
    split_by and refill_above (see :class:`FillPolicy`).
    """

    name = "spill_cost"
    removed: ClassVar[Mapping[str, str]] = {
        "egress": "exports have a price, and within=node keeps experts in the node of their home slot"
    }
    split_by: str | Policy = "exact"
    expert_bytes: float = DEEPSEEK_V3_FP8
    token_us: float = 0.147
    min_chunk: int = 1
    within: Within = "all"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        break_even(self.expert_bytes, 1.0, self.token_us)  # refuses what is not positive
        if not 1 <= self.min_chunk < 2**31:
            raise ValueError(f"min_chunk must be in 1..2^31-1, got {self.min_chunk}")

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        near, far = (
            break_even(self.expert_bytes, bandwidth, self.token_us)
            for bandwidth in placed.topology.bandwidths or DEFAULT_BANDWIDTHS
        )
        filled = self.fill_levels(
            demand,
            placed,
            min_chunk=self.min_chunk,
            import_costs=(near, far),
            export_costs=(near, far),
            within=self.within,
        )
        return self.filled(demand, placed, filled)
