"""The table and the JSON of an inspection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from isoload.replay.inspection import LayerStats
from isoload.report.tables import Figure, json_of, percent, print_lines, print_table, table_of
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
