"""The first stage of the fast clock: how many copies this rank sends to each logical expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import Numbered
from isoload.placement import Placement
from isoload.shared_experts import check_shared_columns
from isoload.value_checks import check_whole


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """[E] int32 copies per logical expert in topk_ids [T, K] (int32 or int64; -1 = masked, not counted).

    All-gather it over the ranks to get loads [R, E].

    Raises:
        ValueError: an id outside -1..E-1, or another dtype.
    """
    return ops.count(topk_ids, num_experts)


def without_padding(topk_ids: Tensor, num_valid: int | Tensor | None) -> Tensor:
    """topk_ids [T, K] with -1 in the rows from num_valid on."""
    check_ids(topk_ids)
    if num_valid is None:
        return topk_ids
    check_whole("num_valid", num_valid)
    row = torch.arange(len(topk_ids), device=topk_ids.device)
    return topk_ids.masked_fill((row >= num_valid).unsqueeze(1), -1)


def check_ids(topk_ids: object) -> None:
    """Raises ValueError unless these are a tensor [T, K]."""
    if not isinstance(topk_ids, Tensor):
        raise ValueError(f"topk_ids must be a tensor [T, K], got {type(topk_ids).__name__}")
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids must be [T, K], got {list(topk_ids.shape)}")


def check_one_each(topk_ids: Sequence[Tensor], owned: int) -> None:
    """Raises ValueError unless there is one tensor per owned rank."""
    if len(topk_ids) != owned:
        raise ValueError(f"topk_ids must have one tensor per owned rank ({owned}), got {len(topk_ids)}")


def count_owned(
    topk_ids: list[Tensor], placement: Placement, shared_columns: bool, numbers: bool
) -> tuple[list[Tensor], list[Tensor], Sequence[Numbered | None]]:
    """Of every owned rank: ids with shared columns, their counts, and numbers where the route looks them up.

    Args:
        topk_ids: [T, K] of every owned rank.
        placement: how many experts there are.
        shared_columns: whether the ids have them; else they are added.
        numbers: whether the route looks them up.
    """
    experts, routed, num_shared = placement.num_experts, placement.num_routed, placement.num_shared
    if num_shared and not shared_columns:
        added = [ops.count_columns(rows, routed, num_shared) for rows in topk_ids]
        topk_ids, numbered = [ids for ids, _ in added], [found for _, found in added]
        return topk_ids, [found.counts for found in numbered], numbered if numbers else [None] * len(topk_ids)
    for rows in topk_ids if num_shared else ():
        check_shared_columns(rows, routed, num_shared)
    if not numbers:
        return topk_ids, [count(rows, experts) for rows in topk_ids], [None] * len(topk_ids)
    numbered = [ops.count_numbered(rows, experts) for rows in topk_ids]
    return topk_ids, [found.counts for found in numbered], numbered
