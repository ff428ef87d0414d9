"""plan_spill: spare slots filled with experts of overloaded ranks, for one batch; wrapper and fake."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from isoload.ops.library import call, ints, like, longs, op
from isoload.results import Spill


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots, batch = a.slot_to_expert, a.slot_to_expert.shape[:-1]
    return like(slots), like(slots), longs(slots, *batch), ints(slots, *batch, 5)


_plan_spill = op("plan_spill", _fake)
MILLION = 1_000_000
UNLIMITED = 2**31 - 1
Within = Literal["all", "node"]
NO_SPARE_SLOT = 2  # a flag, see Spill


def plan_spill(
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
    capacity_factor: float | None = 1.0,
    imbalance_threshold: float = 0.0,
    per_expert: bool = False,
    tolerance: float = 0.0,
    min_chunk: int = 1,
    import_costs: tuple[int, int] = (0, 0),
    egress: int | None = None,
    within: Within = "all",
) -> Spill:
    """Lends experts of overloaded ranks to others for one batch, from where the copies are before: `start`.

    The busiest rank gives first, always from its largest expert, to the rank that takes the largest chunk without
    passing the target. Of papers/003 (LLEP) the idea, not the steps: no expert comes twice to a rank, none beyond the
    spare slots, and no rank's load passes the largest at the start. A rank that holds a replica takes copies without
    an import. Where the ranks with room have no spare slot left and there are no replicas, a rank that lends to one of
    them lends it more copies of that expert and takes the chunk itself.

    Where experts have replicas and `start` is given, copies are also lent as if all were in their home slots: the exact
    split may leave several ranks a little above the target, each of which needs an import, where one would have done.
    The plan from `start` is returned if its largest cost is lower, or as low with neither more imports nor a higher
    peak (an excess below min_chunk counts for nothing); else the other.

    Where spare slots run out before all ranks are at the capacity, levels above it are tried, as UltraEP does, in at
    most five rounds of two: at a level the largest expert of any rank above it goes, whole if it fits, to the rank with
    most room. The best of them is returned if its largest cost is lower still.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as slot_to_expert); sources are summed.
        slot_to_expert: [P] or [L, P] int32, the placement; -1 in the last spare_slots of every rank. Ids from E on
            are no routed experts.
        home_slot: [E] int32 (leading L as above) slot that owns each expert's weights.
        num_ranks: R, divides P.
        spare_slots: how many experts a rank can import.
        fixed: [R] int32 copies that ranks carry besides and cannot give away (leading L as above).
        start: [P] int32 copies per slot before anything is lent (leading L as above), e.g. the quota of the exact split
            over replicas; adds up to the loads. None = all in home slots (plain EP).
        alive: [R] bool; ranks that are not import nothing. None = all.
        ranks_per_node: divides R; None = R. A rank of the node is asked first, unless its chunk is below min_chunk and
            a far one is larger.
        capacity_factor: a rank's capacity, 1..1000 times the mean load of the live ranks, rounded up. None: no
            capacity, the least cost is sought, where a rank's cost is its copies plus what its imports cost.
        imbalance_threshold: up to this max / mean load of the ranks nothing moves, 0..1000.
        per_expert: the threshold is about max / mean of the experts instead.
        tolerance: a rank above its capacity by at most this part of it keeps a rest that would leave in chunks smaller
            than min_chunk, 0..1000.
        min_chunk: copies that are worth an import, at least 1. With a capacity a rank that is above it by less lends
            nothing more, and nothing at all if it was so from the start.
        import_costs: copies that could be computed in the time of an import, (from the own node, from another),
            0..2^30.
        egress: most exports of a rank; None = any number.
        within: "node": an expert is borrowed only in the node of its home, and the capacity and the threshold are about
            the mean load of the most loaded node. "all": anywhere.
    """
    for name, value, low in (
        ("capacity_factor", capacity_factor, 1),
        ("imbalance_threshold", imbalance_threshold, 0),
        ("tolerance", tolerance, 0),
    ):
        if value is not None and not low <= value <= 1000:
            raise ValueError(f"{name} must be in {low}..1000, got {value}")
    if within not in ("all", "node"):
        raise ValueError(f"within must be all or node, got {within!r}")
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    placement = (slot_to_expert, home_slot, num_ranks, per_node, spare_slots)
    rules = (
        0 if capacity_factor is None else round(capacity_factor * MILLION),
        round(imbalance_threshold * MILLION),
        per_expert,
        round(tolerance * MILLION),
        min_chunk,
        *import_costs,
        UNLIMITED if egress is None else egress,
        within == "node",
    )
    return Spill(*call(_plan_spill, loads, *placement, fixed, start, alive, *rules))
