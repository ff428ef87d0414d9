"""plan_active: every expert on one replica, so that the busiest rank has as few active slots as possible."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.results import ActiveSplit
from isoload.ops.tables import ReplicaTables
from reference.plan_exact import plan_exact
from reference.replica_tables import replicas

ROUNDS = 8


def plan_active(loads: Tensor, tables: ReplicaTables) -> ActiveSplit:
    """The choice of isoload.ops.plan_active, which documents the arguments.

    plan_exact with one unit per expert that has load: the units stay whole, so each chooses a replica.
    """
    if tables.data.dim() == 2:
        layers = [plan_active(loads[i], tables[i]) for i in range(len(tables.data))]
        return ActiveSplit(*(torch.stack(field) for field in zip(*layers, strict=True)))
    totals = loads.reshape(-1, tables.num_experts).sum(0)
    units = plan_exact((totals > 0).int(), tables, sweeps=ROUNDS)
    peak, held = int(units.peak), replicas(tables)
    chosen = {e: p for e, slots in enumerate(held) for p in slots if units.quota[p] > 0}
    assert sorted(chosen) == totals.nonzero().flatten().tolist(), "every expert with load has a slot"

    settling = Settling(chosen, totals.tolist(), tables, peak)
    order = tables.field("order").tolist()[: int(tables.field("header")[0])]
    moves = 0
    for _ in range(ROUNDS):
        moved = sum(settling.relieve(e, held[e]) for e in order if e in chosen)
        moves += moved
        if not moved:
            break
    assert max(settling.active) == peak, "settling keeps the optimum"

    quota = torch.zeros(tables.num_slots, dtype=torch.int32)
    for e, p in chosen.items():
        quota[p] = totals[e]
    telemetry = torch.cat([units.telemetry[:3], torch.tensor([moves], dtype=torch.int32)])
    return ActiveSplit(quota, units.peak, units.bound, telemetry)


class Settling:
    """Lowers the load of ranks, in copies, while no rank exceeds ``peak`` active slots."""

    def __init__(self, chosen: dict[int, int], totals: list[int], tables: ReplicaTables, peak: int) -> None:
        self.chosen, self.totals, self.peak = chosen, totals, peak
        self.slots_per_rank = tables.num_slots // tables.num_ranks
        self.active, self.copies = [0] * tables.num_ranks, [0] * tables.num_ranks
        for e, p in chosen.items():
            self.add(e, p // self.slots_per_rank, 1)

    def add(self, expert: int, rank: int, sign: int) -> None:
        self.active[rank] += sign
        self.copies[rank] += sign * self.totals[expert]

    def relieve(self, expert: int, slots: list[int]) -> bool:
        """Moves an expert to where it lowers the larger load of two ranks most; False if nowhere."""
        own = self.chosen[expert] // self.slots_per_rank
        best, least = None, self.copies[own]
        for p in slots:
            rank = p // self.slots_per_rank
            if rank == own or self.active[rank] + 1 > self.peak:
                continue
            after = self.copies[rank] + self.totals[expert]
            if after < least:
                best, least = p, after
        if best is None:
            return False
        self.add(expert, own, -1)
        self.add(expert, best // self.slots_per_rank, 1)
        self.chosen[expert] = best
        return True
