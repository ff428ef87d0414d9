"""count: how many copies go to each logical expert, and every copy's place among them; wrapper and fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.ops.results import PART_ROWS, Counted


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, K = a.topk_ids.shape
    shape, experts = (T, K + a.num_shared), a.num_experts + a.num_shared
    parts = ints(a.topk_ids, (T + PART_ROWS - 1) // PART_ROWS, experts)
    columns = a.topk_ids.new_empty(shape if a.num_shared else (0, 0))
    return columns, ints(a.topk_ids, experts), ints(a.topk_ids, *shape), parts


_count = op("count", _fake)


def count(topk_ids: Tensor, num_experts: int, num_shared: int = 0) -> Counted:
    """How many copies go to each logical expert, and every copy's place among the copies of its expert.

    The place does not depend on the plan, so :func:`route` need not look for it once the plan is there.

    Args:
        topk_ids: [T, K] int32 or int64; -1 = masked, not counted.
        num_experts: E.
        num_shared: n shared experts, which follow the E; every token with a choice needs them. Their columns are added
            behind the ids, -1 there for a token without a choice, and counted with them, as of E + n experts.
    """
    columns, *found = call(_count, topk_ids, num_experts, num_shared)
    return Counted(columns if num_shared else topk_ids, *found)
