"""Policy ``spill_cost``: borrows an expert only where computing its tokens elsewhere saves more than the transfer."""

from __future__ import annotations

from dataclasses import dataclass

from isoload.cost import DEEPSEEK_V3_FP8, DEFAULT_BANDWIDTHS, break_even
from isoload.ops import Within
from isoload.policies.base import Demand, Policy
from isoload.policies.borrowing import BorrowPolicy, plan_spill
from isoload.records.placed_layers import PlacedLayers


@dataclass(frozen=True)
class SpillCostPolicy(BorrowPolicy):
    """The least found over plans of the costliest rank, where a rank's cost is its copies plus its imports.

    An import costs as many copies as could be computed in its time (:func:`isoload.cost.break_even`), by the
    topology's bandwidths, or DEFAULT_BANDWIDTHS if it has none. Ranks of the own node help first, unless their chunk
    is below min_chunk and a far one is larger. Starts from the exact split over resident replicas; no rank's load
    passes the largest of that. It costs no more than the plan found as if replicas took nothing, and has more imports
    or a higher peak than that only where it costs less.

    Options: expert_bytes (weights of one expert), token_us (microseconds per copy in a large GEMM), egress (most
    exports of a rank; None = any number), min_chunk (copies; a smaller chunk near home gives way to a larger far one,
    none is refused), within ("all" or "node", beyond which no expert is borrowed), split_by ("fill" or "exact").
    """

    name = "spill_cost"
    split_by: str | Policy = "fill"
    expert_bytes: float = DEEPSEEK_V3_FP8
    token_us: float = 0.147
    egress: int | None = None
    min_chunk: int = 256
    within: Within = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        break_even(self.expert_bytes, 1.0, self.token_us)  # refuses what is not positive
        if self.egress is not None and (not isinstance(self.egress, int) or self.egress < 0):
            raise ValueError(f"egress must be an integer, not negative, got {self.egress}")
        if not 1 <= self.min_chunk < 2**31:
            raise ValueError(f"min_chunk must be in 1..2^31-1, got {self.min_chunk}")

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        near, far = placed.topology.bandwidths or DEFAULT_BANDWIDTHS
        spill = plan_spill(
            demand,
            placed,
            capacity_factor=None,
            min_chunk=self.min_chunk,
            import_costs=(
                break_even(self.expert_bytes, near, self.token_us),
                break_even(self.expert_bytes, far, self.token_us),
            ),
            egress=self.egress,
            within=self.within,
        )
        return placed.fill(spill.slot_to_expert, spill.quota, spill.telemetry)
