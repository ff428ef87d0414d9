"""route_numbered: the slot of every copy on this rank, whose place is known; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables
from isoload.results import Numbered, SharedColumns

_route_numbered = library.route_numbered.default
NO_COLUMNS = SharedColumns(0, 0, 0)


def route_numbered(
    topk_ids: Tensor,
    numbered: Numbered,
    source_quota: Tensor,
    tables: ReplicaTables,
    shared: SharedColumns = NO_COLUMNS,
) -> Tensor:
    """:func:`route` by a look-up per copy: the same slots. And the shared experts' as :func:`route_shared` has them.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        numbered: :func:`count_numbered` of topk_ids. Of ids with more columns or experts it serves with these left
            out: ``numbers[:, :K]``, ``parts[:, :E]``, if the columns that are left out hold none of the E experts.
        source_quota: [P] int32, this rank's row of :func:`share`.
        tables: of this layer's routed experts.
        shared: where topk_ids [T, K + n] end in the n shared experts, E and on, or in -1 where all routed choices are.
            numbered is then of all of them.

    Returns:
        [T, K] slots, with shared experts [T, K + n], in the dtype of topk_ids; -1 where topk_ids is -1.
    """
    slots: Tensor = call(
        _route_numbered,
        topk_ids,
        numbered.numbers,
        numbered.parts,
        source_quota,
        tables.data,
        tables.num_experts,
        shared.row,
        tables.num_ranks,
        shared.num_shared,
        shared.first_shared,
        shared.home,
        shared.strict,
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
    shared_row: Tensor | None,
    num_ranks: int,
    num_shared: int,
    first_shared: int,
    home: int,
    strict: bool,
) -> Tensor:
    return torch.empty_like(topk_ids)
