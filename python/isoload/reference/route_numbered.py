"""route_numbered: the slot of every copy on one rank, from its place among the copies of its expert."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from isoload.reference.replica_tables import replicas
from isoload.reference.route_shared import route_shared
from isoload.replica_tables import ReplicaTables
from isoload.results import PART_ROWS, Numbered, SharedColumns


def route_numbered(
    topk_ids: Tensor,
    numbered: Numbered,
    source_quota: Tensor,
    tables: ReplicaTables,
    shared: SharedColumns | None = None,
) -> Tensor:
    """[T, K] slots: the copy goes to its expert's first replica whose cumulative share exceeds the copy's place.

    The place is the copy's number in its part, after all of the expert's copies in the parts before.
    """
    if shared is not None:
        routed = topk_ids[:, : topk_ids.shape[1] - shared.num_shared]
        slots_of = route_numbered(routed, numbered, source_quota, tables)
        return torch.cat([slots_of, _shared_slots(slots_of, tables, shared)], dim=1)
    held, share = replicas(tables), source_quota.tolist()
    cumulative = [list(accumulate(share[p] for p in ps)) for ps in held]
    before = (numbered.parts.cumsum(0) - numbered.parts).tolist()
    slots = []
    for t, (token, numbers) in enumerate(zip(topk_ids.tolist(), numbered.numbers.tolist(), strict=True)):
        for e, number in zip(token, numbers, strict=True):
            place = -1 if e == -1 else before[t // PART_ROWS][e] + number
            slots.append(
                -1
                if e == -1
                else next(p for p, upto in zip(held[e], cumulative[e], strict=True) if upto > place)
            )
    received = torch.tensor([p for p in slots if p >= 0], dtype=torch.int64)
    assert torch.equal(received.bincount(minlength=tables.num_slots), source_quota.long()), (
        "slots get their share"
    )
    return torch.tensor(slots, dtype=topk_ids.dtype).view(topk_ids.shape)


def _shared_slots(slots: Tensor, tables: ReplicaTables, shared: SharedColumns) -> Tensor:
    """[T, n] of every token with a routed slot: on the home rank, or where the share has them."""
    size = tables.num_slots // tables.num_ranks
    if shared.row is None:
        present = (slots >= 0).any(1, keepdim=True)
        ranks = torch.where(present, shared.home, -1).expand(-1, shared.num_shared)
    else:
        ranks = route_shared(slots, shared.row, size, shared.home, shared.num_shared, strict=shared.strict)
    place = shared.first_shared + torch.arange(shared.num_shared)
    return torch.where(ranks < 0, -1, ranks * size + place).to(slots.dtype)
