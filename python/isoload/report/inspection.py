"""The table of an inspection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from isoload.replay.inspection import HIGH_SKEW, LargestShare, LayerStats
from isoload.report.tables import Column, percent, print_lines, print_table, table
from isoload.trace import Trace


def inspect_table(layers: Sequence[LayerStats]) -> tuple[list[str], list[str]]:
    """Heading and a row per layer of an inspection."""

    def share(group: str, of: Callable[[LayerStats], LargestShare]) -> list[Column]:
        return [
            Column(group, "hottest", [str(of(layer).hottest) for layer in layers]),
            Column(group, "all", [percent(of(layer).total) for layer in layers]),
            Column(group, "mean", [percent(of(layer).mean) for layer in layers]),
            Column(group, "max", [percent(of(layer).max) for layer in layers]),
        ]

    return table(
        [
            Column("", "layer", [str(layer.layer_id) for layer in layers]),
            *share("largest share of an expert", lambda layer: layer.expert),
            *share("largest share of a rank", lambda layer: layer.rank),
            Column("max/mean", "expert", [f"{layer.expert_max_over_mean:.2f}" for layer in layers]),
            Column("max/mean", "rank", [f"{layer.imbalance:.2f}" for layer in layers]),
            Column("", "class", [layer.skew for layer in layers]),
        ]
    )


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
