"""The table and the JSON of an inspection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from isoload.replay.inspection import HIGH_SKEW, LayerStats
from isoload.report.tables import Figure, json_of, percent, print_lines, print_table, table_of
from isoload.trace import Trace


def _share(of: str) -> list[Figure]:
    """The figures of one :class:`isoload.replay.inspection.LargestShare`."""
    group = f"largest share of {'an expert' if of == 'expert' else 'a rank'}"
    return [
        Figure(f"{of}.hottest", group, "hottest", ""),
        Figure(f"{of}.total", group, "all", "%"),
        Figure(f"{of}.mean", group, "mean", "%"),
        Figure(f"{of}.max", group, "max", "%"),
        Figure(f"{of}.per_batch"),
    ]


FIGURES = (
    Figure("layer_id", "", "layer", ""),
    *_share("expert"),
    *_share("rank"),
    Figure("expert_max_over_mean", "max/mean", "expert", ".2f"),
    Figure("imbalance", "max/mean", "rank", ".2f"),
    Figure("skew", "", "class", ""),
)


def inspect_table(layers: Sequence[LayerStats]) -> tuple[list[str], list[str]]:
    """Heading and a row per layer of an inspection."""
    return table_of(FIGURES, layers)


def inspect_json(trace: Trace, num_ranks: int, layers: Sequence[LayerStats]) -> dict[str, Any]:
    """The JSON object of ``isoload inspect --json``."""
    rows = [json_of(FIGURES, layer) for layer in layers]
    return {"trace": trace.name, "num_ranks": num_ranks, "layers": rows}


def print_inspection(trace: Trace, num_ranks: int, layers: Sequence[LayerStats], console: Console) -> None:
    model = f" ({trace.provenance['model']})" if trace.provenance.get("model") else ""
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    ranks = f"experts in order on {num_ranks} ranks, no replicas"
    print_lines(console, [f"{trace.name}{model}", f"{shape}; {ranks}"], "bold")
    print_table(console, *inspect_table(layers))
    expert, rank = max(layer.expert.max for layer in layers), max(layer.rank.max for layer in layers)
    high = sum(layer.skew == "high-skew" for layer in layers)
    notes = [
        f"largest in any layer and batch: expert {percent(expert)}, rank {percent(rank)}",
        f"high-skew (hottest expert > {HIGH_SKEW:g} x mean): {high} of {len(layers)} layers",
        "hottest, all, max/mean: all batches as one. mean, max: of each batch's largest share.",
    ]
    print_lines(console, notes, "dim")
