"""``isoload place``: traces to a placement file, and what it buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import typer

from isoload.formats import FORMATS, read_placement, write_placement
from isoload.placement import Placement
from isoload.placers import PLACERS, layers_of, parse_placer, place
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
from isoload.topology import Topology
from isoload.trace import Trace


@dataclass(frozen=True)
class PlaceSettings:
    """What is placed where. slots_per_rank 0: E/R and the placer's replicas; expert_bytes 0: not known; replica_memory
    bytes of a rank for replicas of all layers, 0: as the placer's options say."""

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
    """Places the experts of some traces, and judges that beside ``eplb``.

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
    slots = settings.slots_per_rank or (None if before is None else before.slots_per_rank)
    given: dict[str, Any] = {"slots_per_rank": slots, "placer": name, **options}
    if before is not None:
        given["before"] = before
    placement = place(list(traces), topology, **given)
    calibrate = settings.calibrate or default_calibrate(traces[0])

    def again(counts: Ints) -> Placement:
        return place(counts, topology, **given)

    def eplb(counts: Ints) -> Placement:
        return place(counts, topology, placement.slots_per_rank, "eplb")

    rivals = [("eplb", eplb(sum_counts(traces)), judge_unseen(traces[0], calibrate, eplb))]
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


def default_calibrate(trace: Trace) -> str:
    """The strictest split that the trace allows."""
    if trace.cluster is not None and len(set(trace.cluster)) > 1:
        return "leave-cluster-out"
    return "interleaved" if trace.num_batches > 1 else "all"


def _judge_file(placement: Placement, trace: Trace) -> tuple[float, float]:
    counts = trace.batch_counts()
    if placement.num_routed != trace.num_experts:
        raise ValueError(f"against must have {trace.num_experts} routed experts, got {placement.num_routed}")
    return float(even_imbalance(placement, counts).mean()), float(exact_imbalance(placement, counts).mean())


def given_placement(context: typer.Context, path: str) -> Placement:
    """The placement of a file, which no option of the command may contradict.

    Raises:
        ValueError: naming the option.
    """
    found = read_placement(path)
    topology = found.topology
    has = {
        "ranks": topology.num_ranks,
        "ranks_per_node": topology.ranks_per_node,
        "slots_per_rank": found.slots_per_rank,
        "spare_slots": found.spare_slots,
        "shared_experts": found.num_shared,
        "placer": "not given",
        "calibrate": "not given",
    }
    for name, value in has.items():
        if name not in context.params:
            continue  # no option of this command
        given = context.params[name]
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and given != value:
            raise ValueError(f"{name} must be {value} with placement {path}, got {given}")
    return found


def check_format(name: str) -> None:
    """Refuses an unknown format before any work is done for it."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")


__all__ = [
    "PlaceSettings",
    "Placing",
    "check_format",
    "default_calibrate",
    "given_placement",
    "run_place",
    "write_placement",
]
