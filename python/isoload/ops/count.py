"""count: how many copies go to each logical expert; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library

_count = library.count.default


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """How many copies go to each logical expert.

    Args:
        topk_ids: any shape (usually [T, K]), int32 or int64; -1 = masked, not counted.
        num_experts: E.

    Returns:
        [E] int32.
    """
    counts: Tensor = call(_count, topk_ids, num_experts)
    return counts


@torch.library.register_fake("isoload::count")
def _(topk_ids: Tensor, num_experts: int) -> Tensor:
    return topk_ids.new_empty((num_experts,), dtype=torch.int32)
