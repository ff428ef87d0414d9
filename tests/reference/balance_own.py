"""balance_own: one rank's slots from its own counts, split at the optimum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.ops.tables import ReplicaTables
from reference.count import count
from reference.plan_own import plan_own
from reference.route import route


def balance_own(
    topk_ids: Tensor, tables: ReplicaTables, offset: Tensor, source: int, **how: Any
) -> tuple[Tensor, Tensor]:
    """[T, K] slots and [E] counts; how: as of plan_own. The op sweeps, and may stop short of this split."""
    counted = count(topk_ids, tables.num_experts)
    return route(counted, plan_own(counted.counts, tables, offset, source, **how), tables), counted.counts
