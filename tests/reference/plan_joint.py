"""plan_joint: the exact split with room for the shared copies, those poured over it, and one source rank's row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.ops.results import JointSplit
from isoload.ops.tables import ReplicaTables
from reference.plan_exact import plan_exact
from reference.plan_waterfill import plan_waterfill
from reference.share import share


def plan_joint(
    loads: Tensor, tables: ReplicaTables, rank: int, num_shared: int, first_shared: int, **options: Any
) -> JointSplit:
    """:func:`plan_exact` with these options and all shared copies as its pour, then :func:`plan_waterfill`.

    Of the first c copies of a source in rank order shared expert j has ``(c + j) // num_shared``.
    """
    ranks, ticks = tables.num_ranks, options.get("ticks")
    per_node = options.get("ranks_per_node") or ranks
    routed, tokens = loads[:, : tables.num_experts].contiguous(), loads[:, tables.num_experts].contiguous()
    pour = tokens.sum(dtype=torch.int32) * num_shared
    split = plan_exact(routed, tables, pour=pour, **options)
    rows = torch.stack([share(routed, split.quota, tables, per_node, r) for r in range(ranks)])
    copies = rows.view(ranks, ranks, -1).sum(-1, dtype=torch.int32)
    poured = plan_waterfill(copies, tokens, num_shared, per_node, ticks=ticks)
    quota = split.quota.clone().view(ranks, -1)
    for source in poured.share.tolist():
        upto = 0
        for to, sent in enumerate(source):
            before, upto = upto, upto + sent
            for j in range(num_shared):
                quota[to, first_shared + j] += (upto + j) // num_shared - (before + j) // num_shared
    bound = torch.minimum(split.bound, poured.peak)
    return JointSplit(quota.view(-1), poured.peak, bound, split.telemetry, rows[rank], poured.share)
