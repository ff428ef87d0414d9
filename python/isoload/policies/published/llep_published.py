"""Policy ``llep_published``: LLEP's planner (papers/003) as published, segment for segment, faults included.

Rule "paper" is Algorithms 2 and 3 as printed, rule "code" the authors' code. Written from the paper and from a
description of the code, none of which is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, sum_sources
from isoload.policies.borrowing import BorrowPolicy
from isoload.policies.llep import check_rules
from isoload.policies.published.on_host import read_batch, write_batch

Rule = Literal["code", "paper"]
MILLION = 1_000_000


@dataclass(frozen=True)
class LlepPublishedPolicy(BorrowPolicy):
    """The published planner's segments as a plan, for comparison, and only where the segments fit.

    It bounds neither imports nor loads. Two segments of one expert on one rank become one. Needs E / R experts per
    rank in order, without replicas, shared experts or ranks that are not alive. Plans on the CPU; for CUDA loads the
    host waits once.

    Options: as of ``llep``; capacity and threshold have the published defaults. rule: "code", the authors' code, or
    "paper", the listings, where helpers are sorted again for every chunk and the capacity is rounded down once.
    """

    name = "llep_published"
    plans_on_host = True
    rule: Rule = "code"
    split_by: str | Policy = "fill"
    capacity: float = 1.1
    min_chunk: int = 1024
    threshold: float = 0.0
    measure: str = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        loads = sum_sources(demand.loads, placed)
        ranks, size = placed.topology.num_ranks, placed.host.slots_per_rank
        experts, (resident, homes) = loads.shape[-1], placed.host.arrays
        layers = slice(None) if placed.layer is None else slice(placed.layer, placed.layer + 1)
        wanted = np.arange(experts) // max(1, experts // ranks)
        if experts % ranks or placed.num_shared or not (homes[layers] // size == wanted).all():
            raise ValueError(
                f"placement must hold experts 0..{experts - 1} in order, {experts}/{ranks} per rank, and no shared "
                "ones for policy llep_published"
            )
        (counts,) = read_batch(self.name, loads)
        made = [
            self._fit(row, slots, ranks, placed.spare_slots)
            for row, slots in zip(
                counts.reshape(-1, experts).tolist(), resident[layers].tolist(), strict=True
            )
        ]
        shape = placed.slot_to_expert.shape[:-1]
        parts = (np.array(part).reshape(*shape, -1) for part in zip(*made, strict=True))
        filled, quota, telemetry = write_batch(placed.slot_to_expert.device, *parts)
        return placed.fill(filled, quota, telemetry)

    def _fit(self, counts: list[int], slots: list[int], ranks: int, spare: int) -> list[list[int]]:
        """One layer's segments as slots, quota and telemetry."""
        size = len(slots) // ranks
        plain = imbalance(counts, ranks, self.measure == "expert") <= self.threshold
        segments = [Segment(e, e * ranks // len(counts), 0, n) for e, n in enumerate(counts) if n]  # plain EP
        if not plain:
            segments = llep_published(counts, ranks, self.capacity, self.min_chunk, self.rule)
        filled, quota = list(slots), [0] * len(slots)
        imports, exports = [0] * ranks, [0] * ranks
        for expert, rank, first, last in segments:
            row = filled[rank * size : (rank + 1) * size]
            if expert not in row:
                if imports[rank] == spare:
                    raise ValueError(
                        f"spare_slots must hold the published plan, rank {rank} imports more than {spare} experts"
                    )
                row[size - spare + imports[rank]] = expert
                filled[rank * size : (rank + 1) * size] = row
                imports[rank] += 1
                exports[expert * ranks // len(counts)] += 1
            quota[rank * size + row.index(expert)] += last - first
        telemetry = [sum(imports), max(imports), max(exports), 0, int(plain)]
        return [filled, quota, telemetry]


class Segment(NamedTuple):
    """Copies first..last-1 of an expert, in the order of their source ranks, are computed on a rank."""

    expert: int
    rank: int
    first: int
    last: int


def imbalance(counts: list[int], num_ranks: int, per_expert: bool = False) -> float:
    """max / mean load of the ranks under plain EP, or of the experts; 1 without copies."""
    per_rank = len(counts) // num_ranks
    ranks = [sum(counts[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
    loads = counts if per_expert else ranks
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def llep_published(
    counts: list[int],
    num_ranks: int,
    capacity_factor: float = 1.1,
    min_chunk: int = 1024,
    rule: Rule = "code",
) -> list[Segment]:
    """Every expert's copies in segments, in the order in which they are decided.

    Its faults, kept: what no rank has room for is forced onto one helper above its capacity, also where that helper
    has just got a segment of the same expert, and nothing goes back to the home rank. The code alone rounds the
    capacity down twice.

    Args:
        counts: [E] copies; expert e lives on rank e // (E / R).
        num_ranks: R, divides E.
        capacity_factor: a rank's capacity, times the mean load.
        min_chunk: a helper with less room than this and than the rest is passed over.
        rule: "code" or "paper".
    """
    per_rank, total_load = len(counts) // num_ranks, sum(counts)
    capacity = max(1, int(capacity_factor * (total_load // num_ranks)))
    if rule == "paper":
        capacity = round(capacity_factor * MILLION) * total_load // (num_ranks * MILLION)
    # copies that a rank has, or will have from its own experts that are still to be placed
    load = [sum(counts[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
    segments: list[Segment] = []

    def chunk(helper: int, left: int) -> int:
        """What a helper takes of the rest; 0 = it is passed over."""
        copies = min(left, capacity - load[helper])
        return 0 if copies <= 0 or (copies < min_chunk and left > copies) else copies

    def assign(expert: int, rank: int, first: int, copies: int) -> int:
        segments.append(Segment(expert, rank, first, first + copies))
        load[rank] += copies
        return first + copies

    for expert in sorted(filter(counts.__getitem__, range(len(counts))), key=lambda e: -counts[e]):
        home, total, done = expert // per_rank, counts[expert], 0
        load[home] -= total
        if room := max(0, capacity - load[home]):
            done = assign(expert, home, 0, min(total, room))
        helpers: list[int] = []
        while done < total:
            # The listing sorts for every chunk, the code only once for an expert whose home rank took none of it.
            if rule == "paper" or room or not helpers:
                helpers = sorted((r for r in range(num_ranks) if r != home), key=load.__getitem__)
                asked = iter(helpers)
            taker = next((r for r in asked if chunk(r, total - done)), None)
            copies = total - done if taker is None else chunk(taker, total - done)
            done = assign(expert, helpers[0] if taker is None else taker, done, copies)
    return segments
