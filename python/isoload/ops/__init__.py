"""Typed wrappers and fake kernels of ``torch.ops.isoload.*``, in pipeline order.

Every op takes one layer or a batch of layers (a leading L), allocates only its results and never waits for a
device. Shapes: R ranks, E logical experts, S slots per rank, P = R*S slots, T tokens, K experts per token.

Raises (all): ValueError naming the argument, the rule and the value. Values are checked on CPU only.
"""

from isoload.ops.relaxed import LpSplit, plan_lp, round_split
from isoload.ops.routed import (
    ExactSplit,
    Order,
    Prefer,
    count,
    plan_exact,
    replica_tables,
    route,
    route_sampled,
    share,
)

__all__ = [
    "ExactSplit",
    "LpSplit",
    "Order",
    "Prefer",
    "count",
    "plan_exact",
    "plan_lp",
    "replica_tables",
    "round_split",
    "route",
    "route_sampled",
    "share",
]
