"""``isoload inspect``: how skewed a trace is, or what the replicas of a placement improve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from isoload.cli import options
from isoload.cli.tables import Column, Figure, Row, columns_of, page_table, percent, say, write_out

if TYPE_CHECKING:
    from isoload.placement.placement import Placement
    from isoload.traces import Trace


SHARES = (("total", "all"), ("mean", "mean"), ("max", "max"))
LOADS = (
    *(("to_half", "<=0.5"), ("to_1", "<=1"), ("to_2", "<=2")),
    *(("to_5", "<=5"), ("to_10", "<=10"), ("above_10", ">10")),
)


def inspect_figures(ranks: Sequence[str]) -> list[Figure]:
    """Return the figures of a layer, with the imbalance that its skew causes on each of these numbers of ranks."""
    costs = [
        Figure(f"on_ranks.{number}.{key}", f"{number} ranks", title, ".2f")
        for number in ranks
        for key, title in (("in_order", "order"), ("least", "least"))
    ]
    expert, rank = "largest share of an expert", "largest share of a rank"
    return [
        Figure("layer_id", "", "layer"),
        Figure("expert.hottest", "hottest expert", "id"),
        Figure("expert_max_over_mean", "hottest expert", "/mean", ".2f"),
        Figure("skew", "hottest expert", "skew", "%"),
        *costs,
        *(Figure(f"expert.{key}", expert, title, "%", wide=True) for key, title in SHARES),
        Figure("rank.hottest", rank, "hottest", wide=True),
        *(Figure(f"rank.{key}", rank, title, "%", wide=True) for key, title in SHARES),
        Figure("imbalance", "max/mean", "rank", ".2f", wide=True),
        *(Figure(f"experts_by_load.{key}", "experts by load/mean", load, wide=True) for key, load in LOADS),
    ]


def print_inspection(
    trace: Trace, num_ranks: int, layers: Sequence[Row], console: Console, wide: bool = False
) -> None:
    from isoload.cli.arguments import record_facts

    numbers = list(layers[0]["on_ranks"])
    columns = columns_of(inspect_figures(numbers), layers, wide)
    costs = ["Mean of the layers, max/mean rank load:", *(_cost_line(layers, n) for n in numbers)]
    notes = inspect_notes(trace, num_ranks, layers)
    facts = [f"{label}: {text}" for label, text in record_facts(trace).items()]
    header = ("bold", inspect_header(trace, num_ranks))
    say(console, header, ("", facts), columns, ("", costs), ("dim", notes))


def inspect_header(trace: Trace, num_ranks: int) -> list[str]:
    model = f" ({trace.provenance['model']})" if trace.provenance.get("model") else ""
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    return [f"{trace.name}{model}", f"{shape}; {options.BASELINE}, on {num_ranks} ranks"]


def inspect_notes(trace: Trace, num_ranks: int, layers: Sequence[Row]) -> list[str]:
    expert, rank = (max(layer[kind]["max"] for layer in layers) for kind in ("expert", "rank"))
    above = sum(layer["experts_by_load"]["above_10"] > 0 for layer in layers)
    scale = f"chosen by every token, {trace.num_experts / trace.top_k:.2f} x" if trace.top_k else "(--top-k)"
    return [
        "order: max/mean rank load with experts in order; least: of any placement without replicas, limited by the "
        "hottest expert. Means over batches.",
        f"hottest expert: all batches as one; skew 0% is the mean, 100% {scale}. --wide shows all figures.",
        f"layers with an expert above 10 times the mean: {above} of {len(layers)}",
        f"largest share in any layer and batch: expert {percent(expert)}, rank of {num_ranks} {percent(rank)}",
    ]


def _cost_line(layers: Sequence[Row], number: str) -> str:
    """Return the imbalance that the skew causes on this number of ranks, mean over layers."""
    costs = [layer["on_ranks"][number] for layer in layers]
    in_order, least = (sum(cost[key] for cost in costs) / len(costs) for key in ("in_order", "least"))
    above = f"{sum(cost['least'] > 1 for cost in costs)} of {len(layers)} layers"
    return f"{number} ranks: {in_order:.2f} in order, {least:.2f} at least; {above} need replicas"


PLACED_UNITS = (
    "in order: no replicas, no plan. placed: no replicas, packed as eplb does. replicated: this placement, "
    "copies spread evenly over replicas; exact: its best split. Means over batches."
)
GAIN_UNITS = (
    "Balancedness gained by this number of replicas of a layer over none, both packed as eplb does; the last row is "
    "the balancedness itself, all layers."
)
PLACED_FIGURES = (
    Figure("layer_id", "", "layer"),
    *(
        Figure(key, "balancedness (mean/max)", key.replace("_", " "), ".3f")
        for key in ("in_order", "placed", "replicated", "exact")
    ),
    Figure("gain_of_placing", "gain of", "placing", "+.3f"),
    Figure("gain_of_replicas", "gain of", "replicas", "+.3f"),
    Figure("replicas", "replicas", "held"),
)


def placed_header(trace: Trace, path: str, placement: Placement) -> list[str]:
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    ranks = f"{placement.slots_per_rank} slots on each of {placement.topology.num_ranks} ranks"
    return [f"{path} under {trace.name}", f"{shape}; {ranks}"]


def _mean(layers: Sequence[Row]) -> Row:
    sums = {figure.key: sum(figure.value(layer) for layer in layers) for figure in PLACED_FIGURES[1:]}
    means = {key: value / len(layers) for key, value in sums.items()}
    return means | {"layer_id": "all", "replicas": sums["replicas"]}


def _by_replicas(view: Row) -> list[Column]:
    """Return a row per layer and a column per number of replicas."""
    layers, means = view["layers"], view["balancedness_by_replicas"]
    columns = [Column("", "layer", [*(str(layer["layer_id"]) for layer in layers), "all"])]
    for k, number in enumerate(view["replicas"]):
        gains = [f"{layer['by_replicas'][k] - layer['by_replicas'][0]:+.3f}" for layer in layers]
        columns.append(Column("replicas of a layer", str(number), [*gains, f"{means[k]:.3f}"]))
    return columns


def inspect(
    context: typer.Context,
    traces: options.TracePaths,
    ranks: Annotated[
        int,
        options.Range(1),
        Option(help="R, number of ranks, which hold the experts in order, without replicas."),
    ] = 8,
    placement: Annotated[
        str | None,
        Option(
            metavar="FILE", help="Placement file: show what its replicas improve instead of the trace's skew."
        ),
    ] = None,
    top_k: options.TopK = None,
    layers: options.LayersText = None,
    wide: options.Wide = False,
    stages: options.Stages = False,
    same_layers: options.SameLayers = False,
    allow_missing_ranks: options.AllowMissingRanks = False,
    first_moe_layer: options.FirstMoeLayer = None,
    model: options.ModelLayers = None,
    json: options.JsonTarget = None,
    html: options.HtmlTarget = None,
    force: options.Force = False,
) -> None:
    """Show how skewed a trace is, per layer, and the imbalance it causes on 8, 16, 32 and R ranks.

    With --placement show the balance of each layer: experts in order, placed without replicas, and as in the file; and
    the gain of each number of replicas.
    """
    from isoload.analysis.inspection import inspect_placement, inspect_trace
    from isoload.cli.arguments import Reading, check_targets, given_placement, load_trace, record_facts

    check_targets([*traces, placement], force, json, html=html)
    reading = Reading(stages, same_layers, allow_missing_ranks, first_moe_layer, model)
    placed = None if placement is None else reading.stated(given_placement(context, placement))
    loaded = load_trace(traces, layers, top_k, reading)
    if placed is not None and placement is not None:
        view = inspect_placement(loaded, placed)
        about = {"trace": loaded.name, "placement": placement, "num_ranks": placed.topology.num_ranks}
        figures, header = {**about, **view}, placed_header(loaded, placement, placed)
        of_layers = columns_of(PLACED_FIGURES, [*view["layers"], _mean(view["layers"])])
        gains = _by_replicas(view)

        def drawn() -> str:
            from isoload.cli.pages import placement_page

            tables, units = page_table(of_layers) + page_table(gains), [PLACED_UNITS, GAIN_UNITS]
            return placement_page(loaded, placed, view, header, tables, units, figures)

        def show(console: Console) -> None:
            say(console, ("bold", header), of_layers, ("dim", [PLACED_UNITS]), gains, ("dim", [GAIN_UNITS]))
    else:
        layer_figures = inspect_trace(loaded, ranks)
        about = {"trace": loaded.name, "record": record_facts(loaded), "num_ranks": ranks}
        figures = {**about, "layers": layer_figures}

        def drawn() -> str:
            from isoload.cli.pages import inspect_page

            numbers = list(layer_figures[0]["on_ranks"])
            tables = page_table(columns_of(inspect_figures(numbers), layer_figures, wide=True))
            costs = [f"{_cost_line(layer_figures, number)}." for number in numbers]
            header, notes = inspect_header(loaded, ranks), inspect_notes(loaded, ranks, layer_figures)
            return inspect_page(loaded, ranks, layer_figures, header, costs, tables, notes, figures)

        def show(console: Console) -> None:
            print_inspection(loaded, ranks, layer_figures, console, wide)

    write_out(json, figures, show, html=html, page=drawn)
