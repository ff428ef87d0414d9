"""count: how many copies go to each logical expert, and every copy's place among them; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.results import PART_ROWS, Counted

_count = library.count.default


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


@torch.library.register_fake("isoload::count")
def _(topk_ids: Tensor, num_experts: int, num_shared: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, experts = (topk_ids.shape[0], topk_ids.shape[1] + num_shared), num_experts + num_shared
    parts = (topk_ids.shape[0] + PART_ROWS - 1) // PART_ROWS
    shapes = ((experts,), shape, (parts, experts))
    counts, numbers, of_parts = (topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return topk_ids.new_empty(shape if num_shared else (0, 0)), counts, numbers, of_parts
