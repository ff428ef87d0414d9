"""Policies for bench_libra: what Libra is compared with there, from the published descriptions; our re-implementations.

`lina` (Li et al., USENIX ATC 2023): replicas of the experts that are predicted popular, an even split over them. Where
the paper leaves the places open: one after another the expert with most predicted copies per replica goes to the least
loaded rank with room. Its predictor is PathTable (path_table.py); here it gets every forecast.

`harmoeny` (Doucet et al., arXiv 2506.12417): plans from the true loads. The busiest rank gives copies of its largest
expert to the least loaded rank until all are level. Its ranks fetch any expert; here one takes as many as it has spare
slots, so a rank without room and without the expert is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies import Demand, Policy
from isoload.policies.base import chosen_plan, even_split, sum_sources
from isoload.policies.borrowing import BorrowPolicy, fill_spare
from isoload.policies.plan import Plan

FULL = 2**62
Grid = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class LinaPolicy(BorrowPolicy):
    """Options: slots, as of ``hedge``."""

    name = "lina"
    ahead = True
    slots: int | None = None

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        bare = Demand(demand.loads)
        made = fill_spare(ops.top_up, bare, placed, self.slots)
        return placed.fill(made.slot_to_expert, telemetry=made.telemetry)

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        return Plan(placed, self, *even_split(demand, placed)[:3], telemetry=placed.telemetry)


@dataclass(frozen=True)
class HarmoenyPolicy(Policy):
    """Options: least, the fewest copies worth a transfer."""

    name = "harmoeny"
    borrows = True
    least: int = 1

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        loads = sum_sources(demand.loads, placed)
        rows = zip(
            loads.view(-1, loads.shape[-1]),
            placed.slot_to_expert.view(-1, placed.host.num_slots),
            strict=True,
        )
        made = [schedule(*row, placed.topology.num_ranks, placed.spare_slots, self.least) for row in rows]
        slots, quota, imports = (
            torch.stack(part).view(*loads.shape[:-1], -1) for part in zip(*made, strict=True)
        )
        return placed.fill(slots, quota, torch.nn.functional.pad(imports, (0, 4)))

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        assert placed.quota is not None
        return chosen_plan(self, placed.quota, demand, placed, placed.telemetry)


def schedule(loads: Tensor, slots: Tensor, ranks: int, spare: int, least: int) -> tuple[Tensor, ...]:
    """Filled slots [P], quota [P] and imports [1] of one layer with loads [E] and slots [P], without replicas."""
    size, mean = len(slots) // ranks, -(-int(loads.sum()) // ranks)
    held = slots.numpy().reshape(ranks, size).copy()
    quota = np.where(held >= 0, loads.numpy()[held.clip(0)], 0)
    free = np.full(ranks, size - spare)  # first spare slot without an expert
    while move := next_move(held, quota, free, mean, least):
        busy, place, taker, copies = move
        if not (held[taker] == held[busy, place]).any():
            held[taker, free[taker]] = held[busy, place]
            free[taker] += 1
        quota[busy, place] -= copies
        quota[taker, int((held[taker] == held[busy, place]).argmax())] += copies
    imports = [int((free - (size - spare)).sum())]
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (held.ravel(), quota.ravel(), imports))


def next_move(held: Grid, quota: Grid, free: Grid, mean: int, least: int) -> tuple[int, int, int, int] | None:
    """(rank, its slot, taking rank, copies): the busiest rank's largest expert that a rank below the mean can take."""
    total = quota.sum(1)
    busy = int(total.argmax())
    for place in np.argsort(-quota[busy], kind="stable").tolist():
        able = (held == held[busy, place]).any(1) | (free < held.shape[1])
        taker = int(np.where(able, total, FULL).argmin())
        copies = min(int(quota[busy, place]), int(total[busy]) - mean, mean - int(total[taker]))
        if able[taker] and copies >= least:
            return busy, place, taker, copies
    return None
