"""share: how many of each replica's quota come from each source rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from isoload.ops.tables import ReplicaTables
from reference.replica_tables import replicas


def share(
    loads: Tensor,
    quota: Tensor,
    tables: ReplicaTables,
    ranks_per_node: int,
    rank: int | None = None,
    order: Literal["locality", "rank_major"] = "locality",
) -> Tensor:
    """[R, P] int32 copies that each source rank sends to each slot, or row ``rank`` of it.

    loads [R, E], quota [P] (both with a leading L if the tables have one). Groups of ranks are served in the
    order of :func:`_groups`. In a group the sources, lowest first, fill its replicas, lowest first, as far as
    both last. So either no source or no replica has copies left: this quota lets no more of them meet.
    """
    if loads.dim() == 3:
        layers = zip(loads, quota, range(len(loads)), strict=True)
        return torch.stack([share(n, q, tables[i], ranks_per_node, rank, order) for n, q, i in layers])
    num_ranks = tables.num_ranks
    slots_per_rank = tables.num_slots // num_ranks
    left, room = loads.tolist(), quota.tolist()  # copies not sent yet; quota not filled yet
    sent = [[0] * tables.num_slots for _ in range(num_ranks)]
    for e, slots in enumerate(replicas(tables)):
        for group in _groups(num_ranks, ranks_per_node, order):
            here = [p for p in slots if p // slots_per_rank in group]
            for source in group:
                for p in here:
                    copies = min(left[source][e], room[p])
                    sent[source][p] += copies
                    left[source][e] -= copies
                    room[p] -= copies
    assert not any(map(any, left)), "every source sends all its copies"
    assert not any(room), "every slot receives its quota"
    rows = torch.tensor(sent, dtype=torch.int32)
    return rows if rank is None else rows[rank]


def share_by_rank(
    loads: Tensor,
    quota: Tensor,
    tables: ReplicaTables,
    ranks_per_node: int,
    order: Literal["locality", "rank_major"] = "locality",
) -> Tensor:
    """[R, R] int32 the share's rows [R, P] (both with a leading L if the tables have one), summed rank by rank."""
    rows = share(loads, quota, tables, ranks_per_node, order=order)
    return rows.view(*rows.shape[:-1], tables.num_ranks, -1).sum(-1, dtype=torch.int32)


def _groups(num_ranks: int, ranks_per_node: int, order: str) -> Iterator[range]:
    """Ranks that may meet: each rank with itself, the ranks of each node, all. rank_major: all at once."""
    for size in (1, ranks_per_node, num_ranks) if order == "locality" else (num_ranks,):
        for first in range(0, num_ranks, size):
            yield range(first, first + size)
