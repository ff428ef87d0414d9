"""plan_replication: experts for the spare slots, from a forecast of who asks for what; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, op
from isoload.ops.top_up import fake_fill
from isoload.results import SlotFill

_plan_replication = op("plan_replication", lambda a: fake_fill(a.slot_to_expert))


def plan_replication(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    local_slots: int = 0,
    printed: bool = False,
) -> SlotFill:
    """Libra's replication plan (papers/004, Algorithm 1): which experts every rank borrows for the next batch.

    A copy counts for its source rank if that holds the expert, else for the expert's home. First each rank takes the
    `local_slots` remote experts that it asks for most. Then, (spare_slots - local_slots) * R times at most, the
    busiest rank hands the expert with most remote copies to the least loaded rank with room, as long as that stays at
    the mean load (rounded up) or below; copies that become local change the loads.

    Args:
        loads: [R, E] or [L, R, E] int32 copies that each source rank is expected to send.
        slot_to_expert, home_slot, num_ranks, spare_slots, fixed, alive: as in :func:`isoload.ops.plan_fill`.
        ranks_per_node: divides R; None = R. Only counted, in the telemetry.
        local_slots: spare slots per rank of the first phase, 0..spare_slots.
        printed: stop at the first refusal, as the algorithm is printed; else the busiest rank's next expert is tried,
            then the next rank's.
    """
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    placement = (slot_to_expert, home_slot, num_ranks, per_node, spare_slots)
    return SlotFill(*call(_plan_replication, loads, *placement, fixed, alive, local_slots, printed))
