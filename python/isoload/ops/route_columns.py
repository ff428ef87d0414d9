"""route_columns: the slots of all copies on this rank, those of shared experts in the last columns; wrapper, fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables
from isoload.results import Numbered, SharedColumns

_route_columns = library.route_columns.default


def route_columns(
    topk_ids: Tensor,
    numbered: Numbered,
    source_quota: Tensor,
    tables: ReplicaTables,
    shared: SharedColumns,
) -> Tensor:
    """:func:`route_numbered` of the routed experts, and the shared ones' slots as :func:`route_shared` has their ranks.

    Args:
        topk_ids: [T, K + n] int32 or int64 logical experts; -1 = masked. The last n columns are the shared experts', E
            and on, or -1 where all routed choices are.
        numbered: :func:`count_numbered` of topk_ids.
        source_quota: [P] int32, this rank's row of :func:`share`.
        tables: of this layer's routed experts.
        shared: the last columns, and where this rank's copies of them go.

    Returns:
        [T, K + n] slots in the dtype of topk_ids; -1 where topk_ids is -1.
    """
    slots: Tensor = call(
        _route_columns,
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


@torch.library.register_fake("isoload::route_columns")
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
