"""Typed wrappers and fake kernels of ``torch.ops.isoload.*``, one module per stage.

Every op takes one layer or a batch of layers (a leading L), allocates only its results and never waits for a device.
Shapes: R ranks, E logical experts, S slots per rank, P = R*S slots, T tokens, K experts per token. A wrong argument
raises ValueError that names it, the rule and the value; on CUDA, wrong values raise in :func:`check_device`.
"""

from isoload.ops.counting import count, group_copies, number_rows, pack_rows
from isoload.ops.library import check_device, device_errors
from isoload.ops.planning import (
    Objective,
    plan_active,
    plan_exact,
    plan_joint,
    plan_lp,
    plan_own,
    plan_waterfill,
    round_split,
)
from isoload.ops.results import (
    ActiveSplit,
    Counted,
    ExactSplit,
    JointSplit,
    LpSplit,
    SharedColumns,
    SlotFill,
    WaterfillSplit,
)
from isoload.ops.routing import (
    Order,
    SharedRule,
    append_shared_expert,
    balance_own,
    balance_same,
    route,
    route_sampled,
    route_shared,
    route_shared_sampled,
    share,
    share_by_rank,
)
from isoload.ops.spare_slots import Within, addresses, borrow, borrow_backward, plan_fill, top_up
from isoload.ops.tables import replica_tables

__all__ = [
    "ActiveSplit",
    "Counted",
    "ExactSplit",
    "JointSplit",
    "LpSplit",
    "Objective",
    "Order",
    "SharedColumns",
    "SharedRule",
    "SlotFill",
    "WaterfillSplit",
    "Within",
    "addresses",
    "append_shared_expert",
    "balance_own",
    "balance_same",
    "borrow",
    "borrow_backward",
    "check_device",
    "count",
    "device_errors",
    "group_copies",
    "number_rows",
    "pack_rows",
    "plan_active",
    "plan_exact",
    "plan_fill",
    "plan_joint",
    "plan_lp",
    "plan_own",
    "plan_waterfill",
    "replica_tables",
    "round_split",
    "route",
    "route_sampled",
    "route_shared",
    "route_shared_sampled",
    "share",
    "share_by_rank",
    "top_up",
]
