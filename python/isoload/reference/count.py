"""count, count_numbered, count_columns: how many copies go to each logical expert."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.results import PART_ROWS, Numbered


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """[E] int32 copies of every expert in topk_ids (any shape, int32 or int64); -1 = masked, not counted."""
    counts = [0] * num_experts
    ids = topk_ids.flatten().tolist()
    for expert in ids:
        if expert != -1:
            counts[expert] += 1
    assert sum(counts) == sum(expert >= 0 for expert in ids), "every copy that is not masked counts once"
    return torch.tensor(counts, dtype=torch.int32)


def count_numbered(topk_ids: Tensor, num_experts: int) -> Numbered:
    """count of topk_ids [T, K], and of every part; a copy's number is how many copies its expert had so far."""
    numbers, parts = [], []
    for part in topk_ids.split(PART_ROWS):
        met = [0] * num_experts
        for expert in part.flatten().tolist():
            numbers.append(-1 if expert == -1 else met[expert])
            if expert != -1:
                met[expert] += 1
        parts.append(met)
    parts = parts if len(topk_ids) else []  # split makes one part of nothing
    of_parts = torch.tensor(parts, dtype=torch.int32).view(len(parts), num_experts)
    counts = of_parts.sum(0, dtype=torch.int32)
    return Numbered(counts, torch.tensor(numbers, dtype=torch.int32).view(topk_ids.shape), of_parts)


def count_columns(topk_ids: Tensor, num_routed: int, num_shared: int) -> tuple[Tensor, Numbered]:
    """topk_ids [T, K] with the shared experts behind every row that has a choice, and count_numbered of all that."""
    shared = list(range(num_routed, num_routed + num_shared))
    rows = [row + (shared if max(row, default=-1) >= 0 else [-1] * num_shared) for row in topk_ids.tolist()]
    columns = torch.tensor(rows, dtype=topk_ids.dtype).view(len(topk_ids), topk_ids.shape[1] + num_shared)
    return columns, count_numbered(columns, num_routed + num_shared)
