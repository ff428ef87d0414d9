"""The first stage: how many copies this rank sends to each logical expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isoload import ops
from isoload.checks import check_whole
from isoload.ops import Counted
from isoload.placement.placement import Placement
from isoload.policies.plan import check_shared_columns


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Return the [E] int32 copies per logical expert in topk_ids, [T, K] or any shape (int32 or int64; -1 = masked).

    All-gather the result over the ranks to get loads [R, E]. Raises ValueError for an id outside -1..E-1.
    """
    rows = topk_ids if topk_ids.dim() == 2 else topk_ids.reshape(-1, 1)
    return ops.count(rows, num_experts).counts


def without_padding(topk_ids: Tensor, num_valid: int | Tensor | None) -> Tensor:
    """Return topk_ids [T, K] with -1 in the rows from num_valid on."""
    check_ids(topk_ids)
    if num_valid is None:
        return topk_ids
    check_whole("num_valid", num_valid)
    row = torch.arange(len(topk_ids), device=topk_ids.device)
    return topk_ids.masked_fill((row >= num_valid).unsqueeze(1), -1)


def check_ids(topk_ids: object) -> None:
    if not isinstance(topk_ids, Tensor):
        raise ValueError(f"topk_ids must be a tensor [T, K], got {type(topk_ids).__name__}")
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids must be [T, K], got {list(topk_ids.shape)}")


def check_one_each(topk_ids: Sequence[Tensor], owned: int) -> None:
    if len(topk_ids) != owned:
        raise ValueError(f"topk_ids must have one tensor per owned rank ({owned}), got {len(topk_ids)}")


def count_owned(topk_ids: list[Tensor], placement: Placement, shared_columns: bool) -> list[Counted]:
    """Count every owned rank's ids [T, K]. Shared experts' columns are added unless topk_ids has them."""
    routed, num_shared = placement.num_routed, placement.num_shared
    if not shared_columns:
        return [ops.count(rows, routed, num_shared) for rows in topk_ids]
    for rows in topk_ids if num_shared else ():
        check_shared_columns(rows, routed, num_shared)
    return [ops.count(rows, placement.num_experts) for rows in topk_ids]
