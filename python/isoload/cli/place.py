"""``isoload place``: traces to a placement file, and what it buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from isoload.formats import read_placement
from isoload.placement import Placement
from isoload.placers import PLACERS, layers_of, make_placer, parse_placer, place
from isoload.replay.calibration import strictest
from isoload.replay.judge import (
    Ints,
    Judged,
    changed_slots,
    count_replicas,
    even_imbalance,
    exact_imbalance,
    judge_unseen,
    most_replicas,
)
from isoload.replay.simulate import default_slots_per_rank
from isoload.topology import Topology
from isoload.trace import Trace


@dataclass(frozen=True)
class PlaceSettings:
    """What is placed where. slots_per_rank 0: those of before, else as many as a replay's; expert_bytes 0: not known;
    replica_memory bytes of a rank for replicas of all layers, 0: as the placer's options say."""

    num_ranks: int
    ranks_per_node: int = 0
    slots_per_rank: int = 0
    placer: str = "scenario"
    before: str | None = None
    against: str | None = None
    calibrate: str | None = None
    expert_bytes: int = 0
    replica_memory: int = 0


@dataclass(frozen=True)
class Placing:
    """The placement, how unseen batches were held back, and a row per placer."""

    placement: Placement
    calibrate: str
    rows: tuple[Judged, ...]


def run_place(traces: Sequence[Trace], settings: PlaceSettings) -> Placing:
    """Places the experts of some traces, and judges that beside experts in order and ``eplb``.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    name, options = parse_placer(settings.placer)
    options |= memory_budget(settings, name, options, traces[0].num_layers)
    topology = Topology(settings.num_ranks, settings.ranks_per_node)
    before, against = (
        None if path is None else layers_of(read_placement(path, topology), traces[0], name)
        for name, path in (("before", settings.before), ("against", settings.against))
    )
    slots: int | None = settings.slots_per_rank or (0 if before is None else before.slots_per_rank)
    if not slots:
        budget = make_placer(name, options).has_budget  # decides itself how many slots each rank has
        slots = None if budget else default_slots_per_rank(traces[0].num_experts, settings.num_ranks)
    given: dict[str, Any] = {"slots_per_rank": slots, "placer": name, **options}
    if before is not None:
        given["before"] = before
    placement = place(list(traces), topology, **given)
    calibrate = settings.calibrate or strictest(traces[0].num_batches, traces[0].cluster)

    def again(counts: Ints) -> Placement:
        return place(counts, topology, **given)

    def in_order(counts: Ints) -> Placement:
        return place(counts, topology, placer="trivial")

    def eplb(counts: Ints) -> Placement:
        return place(counts, topology, placement.slots_per_rank, "eplb")

    rivals = [
        (label, make(sum_counts(traces)), judge_unseen(traces[0], calibrate, make))
        for label, make in (("in order", in_order), ("eplb", eplb))
    ]
    rivals.append((settings.placer, placement, judge_unseen(traces[0], calibrate, again)))
    if against is not None:
        rivals.append((settings.against or "", against, _judge_file(against, traces[0])))
    old = before if before is not None else against
    rows = [
        Judged(
            label,
            *worth,
            replicas=count_replicas(made),
            replica_bytes=round(most_replicas(made) * settings.expert_bytes)
            if settings.expert_bytes
            else None,
            changed=None if old is None or old.num_slots != made.num_slots else changed_slots(old, made),
        )
        for label, made, worth in rivals
    ]
    return Placing(placement, calibrate, tuple(rows))


def memory_budget(
    settings: PlaceSettings, name: str, options: dict[str, Any], num_layers: int
) -> dict[str, int]:
    """The placer's option ``replicas`` from bytes, if they are given."""
    memory, size = settings.replica_memory, settings.expert_bytes
    if memory == 0:
        return {}
    if memory < 0 or size < 1:
        raise ValueError(
            f"replica_memory must be at least 0 and come with expert_bytes, got {memory} and {size}"
        )
    if "replicas" in options:
        raise ValueError(f"replica_memory must be 0 where the placer has replicas, got {memory}")
    if "replicas" not in [field.name for field in fields(PLACERS[name])]:
        raise ValueError(f"replica_memory must be 0 for placer {name}, which has no budget, got {memory}")
    return {"replicas": min(memory // size, num_layers)}


def sum_counts(traces: Sequence[Trace]) -> Ints:
    total: Ints = sum(trace.batch_counts().sum(0) for trace in traces)  # type: ignore[assignment]
    return total


def _judge_file(placement: Placement, trace: Trace) -> tuple[float, float]:
    counts = trace.batch_counts()
    if placement.num_routed != trace.num_experts:
        raise ValueError(f"against must have {trace.num_experts} routed experts, got {placement.num_routed}")
    return float(even_imbalance(placement, counts).mean()), float(exact_imbalance(placement, counts).mean())


__all__ = ["PlaceSettings", "Placing", "run_place"]
