"""top_up: spare slots that a fill left empty take more replicas of the hottest experts; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.results import SlotFill

_top_up = library.top_up.default


def top_up(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
) -> SlotFill:
    """Fills the spare slots still empty, for a split of loads that are not quite those of the forecast.

    One slot after another: the expert with most copies per replica goes to the least loaded live rank that lacks it
    and has room, where every expert counts as split evenly over its replicas (in 1/65536 copies, rounded down).
    Experts without copies fill nothing.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as slot_to_expert); sources are summed.
        slot_to_expert: [P] or [L, P] int32, spare slots filled or not.
        home_slot: [E] int32 (leading L as above) slot that owns each expert's weights.
        num_ranks: R, divides P.
        spare_slots: the last so many slots of every rank may be filled where they are -1.
        fixed: [R] int32 copies that ranks carry besides (leading L as above).
        alive: [R] bool; ranks that are not borrow nothing. None = all.
        ranks_per_node: divides R; None = R. Only counted, in the telemetry, which is of all spare slots.
    """
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    result = call(
        _top_up, loads, slot_to_expert, home_slot, num_ranks, per_node, spare_slots, fixed, alive
    )  # fmt: skip
    return SlotFill(*result)


@torch.library.register_fake("isoload::top_up")
def _(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    ranks_per_node: int,
    spare_slots: int,
    fixed: Tensor | None,
    alive: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch = slot_to_expert.shape[:-1]
    return slot_to_expert.new_empty(slot_to_expert.shape), slot_to_expert.new_empty((*batch, 5))
