"""Typed wrappers and fake kernels of ``torch.ops.isoload.*``: a file per op, a variant beside its op.

Every op takes one layer or a batch of layers (a leading L), allocates only its results and never waits for a
device. Shapes: R ranks, E logical experts, S slots per rank, P = R*S slots, T tokens, K experts per token.

Raises (all): ValueError naming the argument, the rule and the value. Values are checked on CPU only; on CUDA
:func:`check_device` tells what was wrong with them, when it is asked.
"""

from isoload.ops.append_shared_expert import append_shared_expert
from isoload.ops.balance_own import balance_own
from isoload.ops.balance_same import balance_same
from isoload.ops.borrow import addresses, borrow, borrow_backward
from isoload.ops.count import count
from isoload.ops.device_errors import check_device, device_errors
from isoload.ops.group_copies import group_copies
from isoload.ops.number_rows import number_rows
from isoload.ops.pack_rows import pack_rows
from isoload.ops.plan_active import plan_active
from isoload.ops.plan_joint import plan_joint
from isoload.ops.plan_lp import plan_lp
from isoload.ops.plan_own import plan_own
from isoload.ops.plan_waterfill import Candidates, plan_waterfill
from isoload.ops.planning import Objective, plan_exact
from isoload.ops.replica_tables import replica_tables
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
from isoload.ops.round_split import round_split
from isoload.ops.route import route, route_sampled
from isoload.ops.route_shared import route_shared
from isoload.ops.route_shared_sampled import SharedRule, route_shared_sampled
from isoload.ops.routing import Order, share, share_by_rank
from isoload.ops.share_alone import share_alone
from isoload.ops.spare_slots import plan_fill
from isoload.ops.top_up import Within, top_up

__all__ = [
    "ActiveSplit",
    "Candidates",
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
    "share_alone",
    "share_by_rank",
    "top_up",
]
