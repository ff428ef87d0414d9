"""``isoload inspect``: how skewed a trace is, or what the replicas of a placement bring to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from isoload.cli.options import Force, JsonTarget, LayersText, TopK, TracePath, Wide
from isoload.cli.tables import (
    Column,
    Figure,
    json_of,
    percent,
    print_lines,
    print_table,
    table,
    table_of,
    write_out,
)

if TYPE_CHECKING:
    from isoload.placement import Placement
    from isoload.replay.inspection import LayerStats
    from isoload.replay.placement_inspection import PlacedLayer, PlacementView
    from isoload.trace import Trace


def _share(of: str) -> list[Figure]:
    """The figures of one :class:`isoload.replay.inspection.LargestShare`."""
    group = f"largest share of {'an expert' if of == 'expert' else 'a rank'}"
    return [
        Figure(f"{of}.total", group, "all", "%", wide=True),
        Figure(f"{of}.mean", group, "mean", "%", wide=True),
        Figure(f"{of}.max", group, "max", "%", wide=True),
        Figure(f"{of}.per_batch"),
    ]


def inspect_figures(ranks: Sequence[int]) -> tuple[Figure, ...]:
    """The figures of a layer, with what its skew costs on each of these numbers of ranks."""
    costs = [
        Figure(f"on_ranks.{number}.{key}", f"{number} ranks", title, ".2f", partial(_cost, number, key))
        for number in ranks
        for key, title in (("in_order", "order"), ("least", "least"))
    ]
    return (
        Figure("layer_id", "", "layer", ""),
        Figure("expert.hottest", "hottest expert", "id", ""),
        Figure("expert_max_over_mean", "hottest expert", "/mean", ".2f"),
        Figure("skew", "hottest expert", "skew", "%"),
        *costs,
        *_share("expert"),
        Figure("rank.hottest", "largest share of a rank", "hottest", "", wide=True),
        *_share("rank"),
        Figure("imbalance", "max/mean", "rank", ".2f", wide=True),
    )


def inspect_json(trace: Trace, num_ranks: int, layers: Sequence[LayerStats]) -> dict[str, Any]:
    """The JSON object of ``isoload inspect --json``."""
    figures = inspect_figures(list(layers[0].on_ranks))
    rows = [json_of(figures, layer) for layer in layers]
    return {"trace": trace.name, "num_ranks": num_ranks, "layers": rows}


def print_inspection(
    trace: Trace, num_ranks: int, layers: Sequence[LayerStats], console: Console, wide: bool = False
) -> None:
    model = f" ({trace.provenance['model']})" if trace.provenance.get("model") else ""
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    ranks = f"experts in order on {num_ranks} ranks, no replicas"
    print_lines(console, [f"{trace.name}{model}", f"{shape}; {ranks}"], "bold")
    numbers = list(layers[0].on_ranks)
    print_table(console, *table_of(inspect_figures(numbers), layers, wide))
    print_lines(
        console, ["Mean of the layers, max/mean rank load:", *(_cost_line(layers, n) for n in numbers)]
    )
    expert, rank = max(layer.expert.max for layer in layers), max(layer.rank.max for layer in layers)
    scale = f"chosen by every token, {trace.num_experts / trace.top_k:.2f} x" if trace.top_k else "(--top-k)"
    notes = [
        "order: max/mean rank load with experts in order; least: of any placement without replicas, which the hottest "
        "expert allows. Means over batches.",
        f"hottest expert: all batches as one; skew 0% is the mean, 100% {scale}. --wide shows all figures.",
        f"largest share in any layer and batch: expert {percent(expert)}, rank of {num_ranks} {percent(rank)}",
    ]
    print_lines(console, notes, "dim")


def _cost(num_ranks: int, key: str, layer: LayerStats) -> float:
    value: float = getattr(layer.on_ranks[num_ranks], key)
    return value


def _cost_line(layers: Sequence[LayerStats], num_ranks: int) -> str:
    """What the skew costs on so many ranks, mean over layers."""
    in_order, least = (
        sum(_cost(num_ranks, key, layer) for layer in layers) / len(layers) for key in ("in_order", "least")
    )
    above = f"{sum(layer.on_ranks[num_ranks].least > 1 for layer in layers)} of {len(layers)} layers"
    return f"{num_ranks} ranks: {in_order:.2f} in order, {least:.2f} at least; {above} need replicas"


PLACED_UNITS = (
    "in order: no replicas, no plan. placed: no replicas, packed as eplb does. replicated: this placement, "
    "replicas sharing alike; exact: the best split of it. Means over batches."
)
GAIN_UNITS = (
    "Balancedness gained by so many replicas of a layer over none, both packed as eplb does; the last row is "
    "the balancedness itself, all layers."
)
PLACED_FIGURES = (
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


def placement_json(trace: Trace, path: str, placement: Placement, view: PlacementView) -> dict[str, Any]:
    """The JSON object of ``isoload inspect --placement --json``."""
    return {
        "trace": trace.name,
        "placement": path,
        "num_ranks": placement.topology.num_ranks,
        "replicas": list(view.replicas),
        "balancedness_by_replicas": list(view.balancedness),
        "layers": [json_of(PLACED_FIGURES, layer) for layer in view.layers],
    }


def print_placement(
    trace: Trace, path: str, placement: Placement, view: PlacementView, console: Console
) -> None:
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    ranks = f"{placement.slots_per_rank} slots on each of {placement.topology.num_ranks} ranks"
    print_lines(console, [f"{path} under {trace.name}", f"{shape}; {ranks}"], "bold")
    print_table(console, *table_of(PLACED_FIGURES, [*view.layers, _mean(view.layers)]))
    print_lines(console, [PLACED_UNITS], "dim")
    print_table(console, *_by_replicas(view))
    print_lines(console, [GAIN_UNITS], "dim")


def _mean(layers: Sequence[PlacedLayer]) -> SimpleNamespace:
    """All layers, as a last row."""
    names = ("in_order", "placed", "replicated", "exact", "gain_of_placing", "gain_of_replicas")
    means = {name: float(sum(getattr(layer, name) for layer in layers) / len(layers)) for name in names}
    return SimpleNamespace(layer_id="all", replicas=sum(layer.replicas for layer in layers), **means)


def _by_replicas(view: PlacementView) -> tuple[list[str], list[str]]:
    """A row per layer, a column per number of replicas."""
    names = [*(str(layer.layer_id) for layer in view.layers), "all"]
    columns = [Column("", "layer", names)]
    for k, number in enumerate(view.replicas):
        gains = [f"{layer.by_replicas[k] - layer.by_replicas[0]:+.3f}" for layer in view.layers]
        columns.append(Column("replicas of a layer", str(number), [*gains, f"{view.balancedness[k]:.3f}"]))
    return table(columns)


def inspect(
    context: typer.Context,
    trace: TracePath,
    ranks: Annotated[
        int, typer.Option(help="R, ranks that hold the experts in order, without replicas.")
    ] = 8,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="What this placement's replicas bring, in place of how skewed it is."
        ),
    ] = None,
    top_k: TopK = None,
    layers: LayersText = None,
    wide: Wide = False,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """How skewed a trace is: per layer its hottest expert, and what that costs on 8, 16, 32 and R ranks.

    With --placement the balance of each layer instead: experts in order, placed without replicas, and as in the file;
    and what so many replicas bring to each.
    """
    from isoload.cli.given import given_placement
    from isoload.cli.targets import check_targets
    from isoload.cli.traces import load_trace
    from isoload.replay.inspection import inspect_trace
    from isoload.replay.placement_inspection import inspect_placement

    check_targets([trace, placement], force, json)
    placed = None if placement is None else given_placement(context, placement)
    loaded = load_trace(trace, layers, top_k)
    if placed is not None and placement is not None:
        view = inspect_placement(loaded, placed)
        figures = placement_json(loaded, placement, placed, view)
        write_out(json, figures, lambda console: print_placement(loaded, placement, placed, view, console))
    else:
        found = inspect_trace(loaded, ranks)
        figures = inspect_json(loaded, ranks, found)
        write_out(json, figures, lambda console: print_inspection(loaded, ranks, found, console, wide))
