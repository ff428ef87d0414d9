"""share_alone: one source rank's part of a quota, from the sums over ranks and its own counts only."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.tables import ReplicaTables
from reference.replica_tables import replicas

ONE = 2**32  # fixed point
GOLDEN, TURN = 0x9E3779B9, 0x5EB851EC  # 0.618.. and 0.37 of ONE


def share_alone(
    counts: Tensor, quota: Tensor, tables: ReplicaTables, source: int, *, past: bool = False
) -> Tensor:
    """[P] int32 copies that the source sends to each slot; counts [E], quota [P] (leading L as the tables).

    The source's n copies of an expert are cut where its quotas cut all its copies, at
    floor(n * (quota_1 + .. + quota_c) / total + offset). Past quotas of 0 alone cut it into equal parts.
    """
    if counts.dim() == 2:
        layers = zip(counts, quota, range(len(counts)), strict=True)
        return torch.stack([share_alone(n, q, tables[i], source, past=past) for n, q, i in layers])
    row, own, quotas = [0] * tables.num_slots, counts.tolist(), quota.tolist()
    for e, slots in enumerate(replicas(tables)):
        if past and not any(quotas[p] for p in slots):
            quotas = [1 if p in slots else q for p, q in enumerate(quotas)]
        total = sum(quotas[p] for p in slots)
        if total == 0:
            assert own[e] == 0, "a source's copies are part of the sum"
            continue
        offset = (ONE // 2 + source * GOLDEN + e * TURN) % ONE
        part = before = 0
        for p in slots:
            part += quotas[p]
            cut = (own[e] * part * ONE + offset * total) // (total * ONE)
            row[p] = cut - before
            before = cut
        assert before == own[e], "every copy is sent"
    assert min(row) >= 0, "cuts never fall"
    return torch.tensor(row, dtype=torch.int32)
