"""shard_tokens: Libra's Algorithm 2 (papers/004), as printed and repaired."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.replica_tables import ReplicaTables
from reference.replica_tables import replicas
from reference.spare_fill import fixed_copies, pick

MILLION = 1_000_000


def shard_tokens(
    loads: Tensor,
    tables: ReplicaTables,
    home_slot: Tensor,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    tolerance: float = 0.0,
    printed: bool = False,
) -> Tensor:
    """The quota of isoload.ops.shard_tokens, which documents the arguments."""
    if tables.data.dim() == 2:
        return torch.stack(
            [
                shard_tokens(
                    loads[i], tables[i], home_slot[i], pick(fixed, i), alive=alive, tolerance=tolerance,
                    printed=printed,
                )
                for i in range(len(tables.data))
            ]
        )  # fmt: skip
    sharding = Sharding(loads.tolist(), tables, home_slot.tolist(), fixed_copies(fixed, tables.num_ranks))
    live = tables.num_ranks if alive is None else int(alive.sum())
    mean = -(-sum(sharding.load) // live)
    limit, transfers = mean * (MILLION + round(tolerance * MILLION)), 0
    while max(sharding.load) * MILLION > limit and sharding.transfer(mean, printed):
        transfers += 1
        assert transfers <= len(home_slot) + 2 * tables.num_ranks, "copies that were moved stay"
    return torch.tensor(sharding.quota, dtype=torch.int32)


class Sharding:
    """remote [E]: copies at each expert's home whose source does not hold it. Quota and rank loads follow."""

    def __init__(
        self, loads: list[list[int]], tables: ReplicaTables, home: list[int], besides: list[int]
    ) -> None:
        size = tables.num_slots // tables.num_ranks
        self.slots = [{p // size: p for p in held} for held in replicas(tables)]  # rank -> slot
        self.owner = [p // size for p in home]
        self.quota, self.load, self.remote = [0] * tables.num_slots, list(besides), [0] * len(home)
        for source, row in enumerate(loads):
            for e, copies in enumerate(row):
                local = source in self.slots[e]
                self.add(e, source if local else self.owner[e], copies)
                self.remote[e] += 0 if local else copies

    def add(self, expert: int, rank: int, copies: int) -> None:
        if copies:
            self.quota[self.slots[expert][rank]] += copies
            self.load[rank] += copies

    def transfer(self, mean: int, printed: bool) -> bool:
        """One transfer from the busiest rank that can give; False if none can."""
        for giver in sorted(range(len(self.load)), key=lambda r: (-self.load[r], r)):
            if self.load[giver] <= mean:
                return False
            own = [e for e, r in enumerate(self.owner) if r == giver and self.remote[e] > 0]
            for e in sorted(own, key=lambda e: (-self.remote[e], self.slots[e][giver])):
                others = [r for r in sorted(self.slots[e]) if r != giver]
                taker = min(others, key=lambda r: self.load[r], default=giver)
                if self.load[taker] >= mean:
                    continue
                copies = min(self.remote[e], mean - self.load[taker])
                copies = copies if printed else min(copies, self.load[giver] - mean)
                self.remote[e] -= copies
                self.add(e, giver, -copies)
                self.add(e, taker, copies)
                return True
        return False
