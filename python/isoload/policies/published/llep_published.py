"""Policy ``llep_published``: LLEP's planner (papers/003) as published, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy, sum_sources
from isoload.policies.borrowing import BorrowPolicy, routed_homes
from isoload.policies.llep import check_rules
from isoload.policies.published.llep_segments import Segment, imbalance, llep_published


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
        segments = home_segments(counts, ranks) if plain else llep_published(
            counts, ranks, self.capacity, self.min_chunk
        )  # fmt: skip
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


def home_segments(counts: list[int], ranks: int) -> list[Segment]:
    """Plain EP as segments."""
    return [Segment(e, e * ranks // len(counts), 0, n) for e, n in enumerate(counts) if n]
