"""The ops of isoload.ops in plain Python: what each one does, bit for bit, written to be read.

Same names, signatures and results on valid input; slow, and checked by their own assertions only.
"""

from isoload.reference.append_shared_expert import append_shared_expert
from isoload.reference.borrow import borrow, borrow_backward
from isoload.reference.count import count, count_columns, count_numbered
from isoload.reference.gather_rows import gather_rows
from isoload.reference.group_copies import group_copies
from isoload.reference.number_rows import number_rows
from isoload.reference.pack_rows import pack_rows
from isoload.reference.plan_active import plan_active
from isoload.reference.plan_exact import plan_exact
from isoload.reference.plan_exact_share import plan_exact_share, plan_exact_share_gathered
from isoload.reference.plan_joint import plan_joint
from isoload.reference.plan_lp import plan_lp
from isoload.reference.plan_own import plan_own
from isoload.reference.plan_replication import plan_replication
from isoload.reference.plan_spill import plan_spill
from isoload.reference.plan_waterfill import plan_waterfill
from isoload.reference.replica_tables import replica_tables
from isoload.reference.round_split import round_split
from isoload.reference.route import route, route_sampled
from isoload.reference.route_columns import route_columns
from isoload.reference.route_numbered import route_numbered
from isoload.reference.route_shared import route_shared
from isoload.reference.route_shared_sampled import route_shared_sampled
from isoload.reference.shard_tokens import shard_tokens
from isoload.reference.share import share, share_by_rank
from isoload.reference.share_alone import share_alone
from isoload.reference.top_up import top_up
from isoload.results import (
    ActiveSplit,
    ExactSplit,
    JointSplit,
    LpSplit,
    Numbered,
    SharedColumns,
    SlotFill,
    Spill,
    WaterfillSplit,
)

__all__ = [
    "ActiveSplit",
    "ExactSplit",
    "JointSplit",
    "LpSplit",
    "Numbered",
    "SharedColumns",
    "SlotFill",
    "Spill",
    "WaterfillSplit",
    "append_shared_expert",
    "borrow",
    "borrow_backward",
    "count",
    "count_columns",
    "count_numbered",
    "gather_rows",
    "group_copies",
    "number_rows",
    "pack_rows",
    "plan_active",
    "plan_exact",
    "plan_exact_share",
    "plan_exact_share_gathered",
    "plan_joint",
    "plan_lp",
    "plan_own",
    "plan_replication",
    "plan_spill",
    "plan_waterfill",
    "replica_tables",
    "round_split",
    "route",
    "route_columns",
    "route_numbered",
    "route_sampled",
    "route_shared",
    "route_shared_sampled",
    "shard_tokens",
    "share",
    "share_alone",
    "share_by_rank",
    "top_up",
]
