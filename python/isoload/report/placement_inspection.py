"""The tables and the JSON of an inspected placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from isoload.placement import Placement
from isoload.replay.placement_inspection import PlacedLayer, PlacementView
from isoload.report.tables import Column, Figure, json_of, print_lines, print_table, table, table_of
from isoload.trace import Trace

FIGURES = (
    Figure("layer_id", "", "layer", ""),
    Figure("in_order", "balancedness (mean/max)", "in order", ".3f"),
    Figure("placed", "balancedness (mean/max)", "placed", ".3f"),
    Figure("replicated", "balancedness (mean/max)", "replicated", ".3f"),
    Figure("exact", "balancedness (mean/max)", "exact", ".3f"),
    Figure("gain_of_placing", "gain of", "placing", "+.3f"),
    Figure("gain_of_replicas", "gain of", "replicas", "+.3f"),
    Figure("replicas", "replicas", "held", ""),
    Figure("by_replicas"),
)


@dataclass(frozen=True)
class _Mean:
    """All layers, as a last row."""

    layer_id: str
    replicas: int
    in_order: float
    placed: float
    replicated: float
    exact: float
    gain_of_placing: float
    gain_of_replicas: float


def placement_json(trace: Trace, path: str, placement: Placement, view: PlacementView) -> dict[str, Any]:
    """The JSON object of ``isoload inspect --placement --json``."""
    return {
        "trace": trace.name,
        "placement": path,
        "num_ranks": placement.topology.num_ranks,
        "replicas": list(view.replicas),
        "balancedness_by_replicas": list(view.balancedness),
        "layers": [json_of(FIGURES, layer) for layer in view.layers],
    }


def print_placement(
    trace: Trace, path: str, placement: Placement, view: PlacementView, console: Console
) -> None:
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    ranks = f"{placement.slots_per_rank} slots on each of {placement.topology.num_ranks} ranks"
    print_lines(console, [f"{path} under {trace.name}", f"{shape}; {ranks}"], "bold")
    print_table(console, *table_of(FIGURES, [*view.layers, _mean(view.layers)]))
    print_lines(
        console,
        [
            "in order: no replicas, no plan. placed: no replicas, packed as eplb does. replicated: this placement, "
            "replicas sharing alike; exact: the best split of it. Means over batches.",
        ],
        "dim",
    )
    print_table(console, *_by_replicas(view))
    print_lines(
        console,
        [
            "Balancedness gained by so many replicas of a layer over none, both packed as eplb does; the last row is "
            "the balancedness itself, all layers.",
        ],
        "dim",
    )


def _mean(layers: Sequence[PlacedLayer]) -> _Mean:
    def mean(name: str) -> float:
        return float(sum(getattr(layer, name) for layer in layers) / len(layers))

    names = ("in_order", "placed", "replicated", "exact", "gain_of_placing", "gain_of_replicas")
    replicas = sum(layer.replicas for layer in layers)
    return _Mean(layer_id="all", replicas=replicas, **{name: mean(name) for name in names})


def _by_replicas(view: PlacementView) -> tuple[list[str], list[str]]:
    """A row per layer, a column per number of replicas."""
    names = [*(str(layer.layer_id) for layer in view.layers), "all"]
    columns = [Column("", "layer", names)]
    for k, number in enumerate(view.replicas):
        gains = [f"{layer.by_replicas[k] - layer.by_replicas[0]:+.3f}" for layer in view.layers]
        columns.append(Column("replicas of a layer", str(number), [*gains, f"{view.balancedness[k]:.3f}"]))
    return table(columns)
