"""top_up: spare slots that a fill left empty take more replicas of the hottest experts; wrapper and fake."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from isoload.ops.library import call, ints, like, op
from isoload.ops.results import SlotFill

Within = Literal["all", "node"]


def is_within_node(within: Within) -> bool:
    if within not in ("all", "node"):
        raise ValueError(f"within must be all or node, got {within!r}")
    return within == "node"


def fake_fill(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Filled slots and telemetry, as shapes."""
    return like(slots), ints(slots, *slots.shape[:-1], 5)


_top_up = op("top_up", lambda a: fake_fill(a.slot_to_expert))


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
    within: Within = "all",
) -> SlotFill:
    """Fills the spare slots still empty, for a split of loads that are not quite those of the forecast.

    One slot after another: the expert with most copies per replica goes to the least loaded live rank that lacks it
    and has room, where every expert counts as split evenly over its replicas (in 1/65536 copies, rounded down).
    Experts without copies fill nothing.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as slot_to_expert); sources are summed.
        slot_to_expert: [P] or [L, P] int32, spare slots filled or not.
        home_slot, num_ranks, fixed, alive: as in :func:`isoload.ops.plan_fill`.
        spare_slots: the last so many slots of every rank may be filled where they are -1.
        ranks_per_node: divides R; None = R. Counted in the telemetry, which is of all spare slots.
        within: "node": an expert goes only to ranks in the node of its home slot. "all": anywhere.
    """
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    placement = (slot_to_expert, home_slot, num_ranks, per_node, spare_slots)
    return SlotFill(*call(_top_up, loads, *placement, fixed, alive, is_within_node(within)))
