"""count: how many copies go to each logical expert."""

from __future__ import annotations

import torch
from torch import Tensor


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """[E] int32 copies of every expert in topk_ids (any shape, int32 or int64); -1 = masked, not counted."""
    counts = [0] * num_experts
    ids = topk_ids.flatten().tolist()
    for expert in ids:
        if expert != -1:
            counts[expert] += 1
    assert sum(counts) == sum(expert >= 0 for expert in ids), "every copy that is not masked counts once"
    return torch.tensor(counts, dtype=torch.int32)
