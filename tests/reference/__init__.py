"""The ops of isoload.ops in plain Python: what each one does, bit for bit, written to be read.

Same names, signatures and results on valid input; slow, and checked by their own assertions only.
"""

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
from reference.append_shared_expert import append_shared_expert
from reference.balance_own import balance_own
from reference.balance_same import balance_same
from reference.borrow import borrow, borrow_backward
from reference.count import count
from reference.group_copies import group_copies
from reference.number_rows import number_rows
from reference.pack_rows import pack_rows
from reference.plan_active import plan_active
from reference.plan_exact import plan_exact
from reference.plan_fill import plan_fill
from reference.plan_joint import plan_joint
from reference.plan_lp import plan_lp
from reference.plan_own import plan_own
from reference.plan_waterfill import plan_waterfill
from reference.replica_tables import replica_tables
from reference.round_split import round_split
from reference.route import route, route_sampled
from reference.route_shared import route_shared
from reference.route_shared_sampled import route_shared_sampled
from reference.share import share, share_by_rank
from reference.top_up import top_up

__all__ = [
    "ActiveSplit",
    "Counted",
    "ExactSplit",
    "JointSplit",
    "LpSplit",
    "SharedColumns",
    "SlotFill",
    "WaterfillSplit",
    "append_shared_expert",
    "balance_own",
    "balance_same",
    "borrow",
    "borrow_backward",
    "count",
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
