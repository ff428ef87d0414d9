"""count, count_numbered, count_columns: how many copies go to each logical expert; wrappers and fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.results import PART_ROWS, Numbered

_count, _count_numbered = library.count.default, library.count_numbered.default
_count_columns = library.count_columns.default


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


def count_numbered(topk_ids: Tensor, num_experts: int) -> Numbered:
    """:func:`count`, and every copy's place among the copies of its expert.

    The place does not depend on the plan, so :func:`route_numbered` need not look for it once the plan is there.

    Args:
        topk_ids: [T, K] int32 or int64; -1 = masked, not counted.
        num_experts: E.

    Returns:
        Numbered.
    """
    return Numbered(*call(_count_numbered, topk_ids, num_experts))


def count_columns(topk_ids: Tensor, num_routed: int, num_shared: int) -> tuple[Tensor, Numbered]:
    """:func:`count_numbered` of routed choices and the shared experts that every token with a choice needs.

    Args:
        topk_ids: [T, K] int32 or int64 routed experts; -1 = masked.
        num_routed: how many there are; the shared experts follow them.
        num_shared: n.

    Returns:
        [T, K + n] topk_ids with the shared experts in the last columns, -1 there for a token without a choice; and
        their Numbered, of num_routed + n experts.
    """
    columns, *found = call(_count_columns, topk_ids, num_routed, num_shared)
    return columns, Numbered(*found)


@torch.library.register_fake("isoload::count")
def _(topk_ids: Tensor, num_experts: int) -> Tensor:
    return topk_ids.new_empty((num_experts,), dtype=torch.int32)


@torch.library.register_fake("isoload::count_numbered")
def _(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = (topk_ids.shape[0] + PART_ROWS - 1) // PART_ROWS
    shapes = ((num_experts,), topk_ids.shape, (parts, num_experts))
    counts, numbers, of_parts = (topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return counts, numbers, of_parts


@torch.library.register_fake("isoload::count_columns")
def _(topk_ids: Tensor, num_routed: int, num_shared: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, experts = (topk_ids.shape[0], topk_ids.shape[1] + num_shared), num_routed + num_shared
    parts = (topk_ids.shape[0] + PART_ROWS - 1) // PART_ROWS
    shapes = ((experts,), shape, (parts, experts))
    counts, numbers, of_parts = (topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return topk_ids.new_empty(shape), counts, numbers, of_parts
