"""route_columns: the slots of all copies on one rank, those of shared experts in the last columns."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.reference.route_numbered import route_numbered
from isoload.reference.route_shared import route_shared
from isoload.replica_tables import ReplicaTables
from isoload.results import Numbered, SharedColumns


def route_columns(
    topk_ids: Tensor,
    numbered: Numbered,
    source_quota: Tensor,
    tables: ReplicaTables,
    shared: SharedColumns,
) -> Tensor:
    """[T, K + n] slots: a token's shared copies go home, or where :func:`route_shared` deals them."""
    size, routed = tables.num_slots // tables.num_ranks, topk_ids.shape[1] - shared.num_shared
    of_routed = numbered._replace(
        numbers=numbered.numbers[:, :routed], parts=numbered.parts[:, : tables.num_experts]
    )
    slots = route_numbered(topk_ids[:, :routed], of_routed, source_quota, tables)
    if shared.row is None:
        present = (slots >= 0).any(1, keepdim=True)
        ranks = torch.where(present, shared.home, -1).expand(-1, shared.num_shared)
    else:
        ranks = route_shared(slots, shared.row, size, shared.home, shared.num_shared, strict=shared.strict)
    place = shared.first_shared + torch.arange(shared.num_shared)
    return torch.cat([slots, torch.where(ranks < 0, -1, ranks * size + place).to(slots.dtype)], dim=1)
