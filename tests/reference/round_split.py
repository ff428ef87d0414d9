"""round_split: whole copies from a real-valued split, by largest remainder."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.tables import ReplicaTables
from reference.replica_tables import replicas


def round_split(split: Tensor, loads: Tensor, tables: ReplicaTables) -> Tensor:
    """The quota of isoload.ops.round_split, which documents the arguments."""
    if tables.data.dim() == 2:
        return torch.stack([round_split(*layer) for layer in zip(split, loads, _layers(tables), strict=True)])
    totals = loads.reshape(-1, tables.num_experts).sum(0, dtype=torch.int64).tolist()
    quota = [0] * tables.num_slots
    for total, slots in zip(totals, replicas(tables), strict=True):
        if slots:
            parts = _round([float(split[p]) for p in slots], total)
            for p, copies in zip(slots, parts, strict=True):
                quota[p] = copies
    return torch.tensor(quota, dtype=torch.int32)


def _layers(tables: ReplicaTables) -> list[ReplicaTables]:
    return [tables[i] for i in range(len(tables.data))]


def _round(parts: list[float], total: int) -> list[int]:
    """Whole numbers near the parts that add up to total, whatever the parts are."""
    whole, left = [], total
    for part in parts:
        whole.append(min(int(part), left))
        left -= whole[-1]
    each, more = divmod(left, len(parts))
    by_fraction = sorted(range(len(parts)), key=lambda i: -(parts[i] % 1))  # stable: ties to the lowest slot
    for i in range(len(parts)):
        whole[by_fraction[i]] += each + (i < more)
    assert sum(whole) == total and min(whole) >= 0
    return whole
