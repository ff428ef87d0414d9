"""route_numbered: the slot of every copy on one rank, from its place among the copies of its expert."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from isoload.reference.replica_tables import replicas
from isoload.replica_tables import ReplicaTables
from isoload.results import PART_ROWS, Numbered


def route_numbered(
    topk_ids: Tensor, numbered: Numbered, source_quota: Tensor, tables: ReplicaTables
) -> Tensor:
    """[T, K] slots: the copy goes to its expert's first replica whose cumulative share exceeds the copy's place.

    The place is the copy's number in its part, after all of the expert's copies in the parts before.
    """
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
