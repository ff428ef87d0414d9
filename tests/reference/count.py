"""count: how many copies go to each logical expert, and every copy's number among them."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.results import PART_ROWS, Counted


def count(topk_ids: Tensor, num_experts: int, num_shared: int = 0) -> Counted:
    """Of topk_ids [T, K], with the shared experts behind every row that has a choice, and of every part of them; a
    copy's number is how many copies its expert had so far in the part."""
    ids, total = topk_ids, num_experts + num_shared
    if num_shared:
        shared = list(range(num_experts, total))
        rows = [
            row + (shared if max(row, default=-1) >= 0 else [-1] * num_shared) for row in topk_ids.tolist()
        ]
        ids = torch.tensor(rows, dtype=topk_ids.dtype).view(len(topk_ids), topk_ids.shape[1] + num_shared)
    numbers, parts = [], []
    for part in ids.split(PART_ROWS) if len(ids) else ():  # split makes one part of nothing
        met = [0] * total
        for expert in part.flatten().tolist():
            numbers.append(-1 if expert == -1 else met[expert])
            if expert != -1:
                met[expert] += 1
        parts.append(met)
    of_parts = torch.tensor(parts, dtype=torch.int32).view(len(parts), total)
    counts = of_parts.sum(0, dtype=torch.int32)
    assert int(counts.sum()) == int((ids >= 0).sum()), "every copy that is not masked counts once"
    return Counted(ids, counts, torch.tensor(numbers, dtype=torch.int32).view(ids.shape), of_parts)
