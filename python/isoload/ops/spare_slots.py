"""plan_fill: spare slots filled with experts of overloaded ranks, for one batch; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, op
from isoload.ops.results import SlotFill
from isoload.ops.top_up import Within, fake_fill, is_within_node

_plan_fill = op("plan_fill", lambda a: fake_fill(a.slot_to_expert))
MILLION = 1_000_000


def plan_fill(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    start: Tensor | None = None,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    capacity_factor: float = 1.0,
    imbalance_threshold: float = 0.0,
    per_expert: bool = False,
    min_chunk: int = 1,
    import_costs: tuple[int, int] = (0, 0),
    export_costs: tuple[int, int] = (0, 0),
    within: Within = "all",
) -> SlotFill:
    """Fill spare slots with experts of overloaded ranks, for a split over the filled slots that follows.

    At a level the largest copies on any rank above it go, whole if they fit, to the roomiest rank below it that has a
    free spare slot or holds the expert already. The first level is the capacity. Where spare slots do not suffice for
    it, or where imports have a price, up to five higher levels are tried. The cheapest level is returned, where a level
    costs its largest load plus the imports of the busiest importer plus the exports of the busiest exporter. Nothing is
    imported if no level costs less than the copies at the start. No expert comes twice to a rank.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as slot_to_expert); sources are summed.
        slot_to_expert: [P] or [L, P] int32, the placement; -1 in the last spare_slots of every rank. Ids from E on
            are no routed experts.
        home_slot: [E] int32 (leading L as above) slot that owns each expert's weights.
        num_ranks: R, divides P.
        spare_slots: how many experts a rank can import.
        fixed: [R] int32 copies that ranks carry besides and cannot give away (leading L as above).
        start: [P] int32 copies per slot before any import (leading L as above), e.g. the quota of the exact split
            over replicas; adds up to the loads. None = all in home slots (plain EP).
        alive: [R] bool; ranks that are not import nothing. None = all.
        ranks_per_node: divides R; None = R.
        capacity_factor: the lowest level, 1..1000 times the mean load of the live ranks, rounded up.
        imbalance_threshold: up to this max / mean load of the ranks nothing moves, 0..1000.
        per_expert: the threshold is about max / mean of the experts instead.
        min_chunk: copies, at least 1; a rank that is above a level by less lends nothing (more).
        import_costs: copies that could be computed in the time of an import, (from the own node, from another),
            0..2^30. An expert moves only with more copies than it costs, and to the rank with most room besides.
        export_costs: the same for the rank of the home slot, (to its own node, to another).
        within: "node": an expert is borrowed only in the node of its home slot, and the capacity and the threshold are
            about the mean load of the most loaded node. "all": anywhere.
    """
    for name, value, low in (
        ("capacity_factor", capacity_factor, 1),
        ("imbalance_threshold", imbalance_threshold, 0),
    ):
        if not low <= value <= 1000:
            raise ValueError(f"{name} must be in {low}..1000, got {value}")
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    placement = (slot_to_expert, home_slot, num_ranks, per_node, spare_slots)
    rules = (
        round(capacity_factor * MILLION),
        round(imbalance_threshold * MILLION),
        per_expert,
        min_chunk,
        *import_costs,
        *export_costs,
        is_within_node(within),
    )
    return SlotFill(*call(_plan_fill, loads, *placement, fixed, start, alive, *rules))
