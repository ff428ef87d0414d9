"""route_numbered: the slot of every copy on this rank, whose place is known; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables
from isoload.results import Numbered

_route_numbered = library.route_numbered.default


def route_numbered(
    topk_ids: Tensor, numbered: Numbered, source_quota: Tensor, tables: ReplicaTables
) -> Tensor:
    """:func:`route` by a look-up per copy: the same slots.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        numbered: :func:`count_numbered` of topk_ids. Of ids with more columns or experts it serves with these left
            out: ``numbers[:, :K]``, ``parts[:, :E]``, if the columns that are left out hold none of the E experts.
        source_quota: [P] int32, this rank's row of :func:`share`.
        tables: of this layer.

    Returns:
        [T, K] slots in the dtype of topk_ids; -1 where topk_ids is -1.
    """
    slots: Tensor = call(
        _route_numbered,
        topk_ids,
        numbered.numbers,
        numbered.parts,
        source_quota,
        tables.data,
        tables.num_experts,
    )
    return slots


@torch.library.register_fake("isoload::route_numbered")
def _(
    topk_ids: Tensor,
    numbers: Tensor,
    parts: Tensor,
    source_quota: Tensor,
    tables: Tensor,
    num_experts: int,
) -> Tensor:
    return torch.empty_like(topk_ids)
