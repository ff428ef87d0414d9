"""Policy ``llep_published``: LLEP's planner (papers/003) as published, segment for segment, faults included.

For comparison with isoload.ops.plan_fill. Written from a description of the code, none of which is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from isoload.policies.base import Demand, Policy, sum_sources
from isoload.policies.borrowing import BorrowPolicy, routed_homes
from isoload.policies.llep import check_rules
from isoload.records.placed_layers import PlacedLayers


@dataclass(frozen=True)
class LlepPublishedPolicy(BorrowPolicy):
    """The published planner's segments as a plan, for comparison: on CPU, and only where the segments fit.

    It bounds neither imports nor loads. Two segments of one expert on one rank become one. Needs E / R experts per
    rank in order, without replicas, shared experts or ranks that are not alive.

    Options: as of ``llep``; capacity and threshold have the published defaults.
    """

    name = "llep_published"
    split_by: str | Policy = "fill"
    capacity: float = 1.1
    min_chunk: int = 1024
    threshold: float = 0.0
    measure: str = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    @property
    def cpu_only(self) -> bool:
        return True

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        loads = sum_sources(demand.loads, placed)
        if loads.device.type != "cpu":
            raise ValueError(f"loads must be on the CPU for policy llep_published, got {loads.device}")
        ranks, size = placed.topology.num_ranks, placed.host.slots_per_rank
        experts = loads.shape[-1]
        homes = routed_homes(placed).view(-1, experts) // size
        wanted = torch.arange(experts) // max(1, experts // ranks)
        if experts % ranks or placed.num_shared or not (homes == wanted).all():
            raise ValueError(
                f"placement must hold experts 0..{experts - 1} in order, {experts}/{ranks} per rank, and no shared "
                "ones for policy llep_published"
            )
        slots = placed.slot_to_expert.view(-1, placed.host.num_slots).tolist()
        layers = [
            self._fit(counts, row, ranks, placed.spare_slots)
            for counts, row in zip(loads.view(-1, experts).tolist(), slots, strict=True)
        ]
        parts = layers[0] if placed.layer is not None else map(torch.stack, zip(*layers, strict=True))
        return placed.fill(*parts)

    def _fit(self, counts: list[int], slots: list[int], ranks: int, spare: int) -> list[torch.Tensor]:
        """One layer's segments as slots, quota and telemetry."""
        size = len(slots) // ranks
        plain = imbalance(counts, ranks, self.measure == "expert") <= self.threshold
        segments = [Segment(e, e * ranks // len(counts), 0, n) for e, n in enumerate(counts) if n]  # plain EP
        if not plain:
            segments = llep_published(counts, ranks, self.capacity, self.min_chunk)
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
        return [torch.tensor(part, dtype=torch.int32) for part in (filled, quota, telemetry)]


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
    counts: list[int], num_ranks: int, capacity_factor: float = 1.1, min_chunk: int = 1024
) -> list[Segment]:
    """Every expert's copies in segments, in the order in which they are decided.

    Its faults, kept: the capacity is rounded down twice, what no rank has room for is forced onto one helper above its
    capacity, also where that helper has just got a segment of the same expert, and nothing goes back home.

    Args:
        counts: [E] copies; expert e lives on rank e // (E / R).
        num_ranks: R, divides E.
        capacity_factor: a rank's capacity, times the mean load.
        min_chunk: a helper with less room than this and than the rest is passed over.
    """
    per_rank, mean = len(counts) // num_ranks, sum(counts) // num_ranks
    capacity = max(1, int(capacity_factor * mean))
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
            # sorted again after every chunk, but only once for the expert of a full home
            if room or not helpers:
                helpers = sorted((r for r in range(num_ranks) if r != home), key=load.__getitem__)
                asked = iter(helpers)
            taker = next((r for r in asked if chunk(r, total - done)), None)
            copies = total - done if taker is None else chunk(taker, total - done)
            done = assign(expert, helpers[0] if taker is None else taker, done, copies)
    return segments
