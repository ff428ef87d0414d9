"""plan_active: every expert wholly on one replica, fewest active slots per rank; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, op
from isoload.ops.planning import fake_split
from isoload.ops.results import ActiveSplit
from isoload.ops.tables import ReplicaTables

_plan_active = op("plan_active", lambda a: fake_split(a, a.loads))


def plan_active(loads: Tensor, tables: ReplicaTables) -> ActiveSplit:
    """Puts all copies of an expert on one of its replicas, so that no rank has more active slots than it must.

    For decode batches: while reading weights takes longer than computing, a rank's time is its number of
    active slots, and a replicated expert is read on every rank that takes a part. The number is the least possible
    (the flow of :func:`plan_exact` with one unit per expert); the peak in copies is then lowered move by move,
    without a promise to be the least at this number.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
        tables: of the same layers.
    """
    return ActiveSplit(*call(_plan_active, loads, tables.data, tables.num_ranks, tables.num_slots))
