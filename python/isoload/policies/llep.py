"""Policies ``llep`` and ``llep_published``: least-loaded expert parallelism (papers/003), mended and as published."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload import ops
from isoload.ops import Within
from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Split, sum_sources
from isoload.policies.exact import ExactPolicy
from isoload.policies.spilling import SpillPolicy, check_within, plan_spill, routed_homes
from isoload.records import rank_cost
from isoload.reference.llep_published import Segment, imbalance, llep_published
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class LlepPolicy(SpillPolicy):
    """Ranks above their capacity lend experts, and send those experts' copies, to less loaded ranks.

    Starts from the exact split over resident replicas. No rank's load passes the largest of that, and none its capacity
    (and tolerance) unless the plan's telemetry says why, see :class:`isoload.ops.Spill`. Where spare slots run out, the
    lowest level is sought at which they suffice, and the copies go as the exact split over the filled slots.

    Options: capacity (times the mean load), min_chunk (copies: a rank that is above its capacity by less lends nothing;
    a larger excess may leave in smaller chunks), threshold (up to this imbalance nothing moves), measure (the
    threshold's: "rank" as the published code, "expert" as the paper's text), tolerance (part of the capacity; within it
    chunks below min_chunk stay at home too), within ("all", or "node": no expert is borrowed beyond its home's node,
    and capacity and threshold are about the mean of the most loaded node), split_by ("fill" = the copies as lent,
    "exact" = the least peak over the filled slots).
    """

    name = "llep"
    capacity: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3
    measure: str = "rank"
    tolerance: float = 0.02
    within: Within = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)
        check_within(self.within)
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000, got {self.tolerance}")

    def spill(self, demand: Demand, placed: PlacedLayers) -> ops.Spill:
        return plan_spill(
            demand,
            placed,
            capacity_factor=self.capacity,
            imbalance_threshold=self.threshold,
            per_expert=self.measure == "expert",
            tolerance=self.tolerance,
            min_chunk=self.min_chunk,
            within=self.within,
        )

    def _split(self, spill: ops.Spill, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        """The copies as lent; where spare slots ran out, the exact split if its peak is lower."""
        exact = ExactPolicy().split(demand, tables, placed)._replace(telemetry=spill.telemetry)
        if self.split_by == "exact":
            return exact
        assert exact.quota is not None and exact.peak is not None
        lent = rank_cost(spill.quota, placed.topology, demand.at_home).amax(-1)
        better = (spill.telemetry.select(-1, 4) & ops.NO_SPARE_SLOT > 0) & (exact.peak < lent)
        return exact._replace(
            quota=torch.where(better.unsqueeze(-1), exact.quota, spill.quota),
            peak=torch.where(better, exact.peak, lent),
        )


@dataclass(frozen=True)
class LlepPublishedPolicy(SpillPolicy):
    """The published planner's segments as a plan, for comparison: on CPU, and only where the segments fit.

    It bounds neither imports nor loads. Two segments of one expert on one rank become one. Needs E / R experts per
    rank in order, without replicas, shared experts or ranks that are not alive.

    Options: as of ``llep``; capacity and threshold have the published defaults.
    """

    name = "llep_published"
    capacity: float = 1.1
    min_chunk: int = 1024
    threshold: float = 0.0
    measure: str = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    def spill(self, demand: Demand, placed: PlacedLayers) -> ops.Spill:
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
        if placed.layer is not None:
            return layers[0]
        return ops.Spill(*(torch.stack(part) for part in zip(*layers, strict=True)))

    def _fit(self, counts: list[int], slots: list[int], ranks: int, spare: int) -> ops.Spill:
        """One layer's segments as slots, quota, largest load and telemetry."""
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
        peak = max(sum(quota[r * size : (r + 1) * size]) for r in range(ranks))
        telemetry = [sum(imports), max(imports), max(exports), 0, int(plain)]
        return ops.Spill(
            torch.tensor(filled, dtype=torch.int32),
            torch.tensor(quota, dtype=torch.int32),
            torch.tensor(peak),
            torch.tensor(telemetry, dtype=torch.int32),
        )


def home_segments(counts: list[int], ranks: int) -> list[Segment]:
    """Plain EP as segments."""
    return [Segment(e, e * ranks // len(counts), 0, n) for e, n in enumerate(counts) if n]


def check_rules(capacity: float, min_chunk: int, threshold: float, measure: str) -> None:
    if not 1 <= capacity <= 1000:
        raise ValueError(f"capacity must be in 1..1000, got {capacity}")
    if not 1 <= min_chunk < 2**31:
        raise ValueError(f"min_chunk must be in 1..2^31-1, got {min_chunk}")
    if not 0 <= threshold <= 1000:
        raise ValueError(f"threshold must be in 0..1000, got {threshold}")
    if measure not in ("rank", "expert"):
        raise ValueError(f"measure must be rank or expert, got {measure!r}")
