"""Typed wrappers and fake kernels of ``torch.ops.isoload.*``, in pipeline order.

Every op takes one layer or a batch of layers (a leading L), allocates only its results and never waits for a
device. Shapes: R ranks, E logical experts, S slots per rank, P = R*S slots, T tokens, K experts per token.

Raises (all): ValueError naming the argument, the rule and the value. Values are checked on CPU only; on CUDA
:func:`check_device` tells what was wrong with them, when it is asked.
"""

from isoload.ops.borrow import (
    addresses,
    borrow,
    borrow_backward,
)
from isoload.ops.device_errors import (
    check_device,
    device_errors,
)
from isoload.ops.plan_active import (
    ActiveSplit,
    plan_active,
)
from isoload.ops.plan_spill import (
    NO_SPARE_SLOT,
    Spill,
    Within,
    plan_spill,
)
from isoload.ops.relaxed import (
    LpSplit,
    plan_lp,
    round_split,
)
from isoload.ops.routed import (
    ExactSplit,
    Objective,
    Order,
    Prefer,
    count,
    plan_exact,
    replica_tables,
    route,
    route_sampled,
    share,
    share_by_rank,
)
from isoload.ops.share_alone import (
    share_alone,
)
from isoload.ops.shared import (
    Candidates,
    WaterfillSplit,
    plan_waterfill,
    route_shared,
)
from isoload.ops.shared_layout import (
    SharedRule,
    append_shared_expert,
    route_shared_sampled,
)

__all__ = [
    "NO_SPARE_SLOT",
    "ActiveSplit",
    "Candidates",
    "ExactSplit",
    "LpSplit",
    "Objective",
    "Order",
    "Prefer",
    "SharedRule",
    "Spill",
    "WaterfillSplit",
    "Within",
    "addresses",
    "append_shared_expert",
    "borrow",
    "borrow_backward",
    "check_device",
    "count",
    "device_errors",
    "plan_active",
    "plan_exact",
    "plan_lp",
    "plan_spill",
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
]
