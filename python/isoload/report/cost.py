"""The table of a replay's predicted layer times, and the constants behind it in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from isoload.cost import CostModel
from isoload.replay.layer_cost import LayerCost
from isoload.report.tables import Column, print_lines, print_table, table

MIB = 2.0**20
UNITS = (
    "µs: predicted, of the busiest rank, one layer. layer = compute + all-to-all + import: nothing hides anything. "
    "change: of the layer's mean, from the first policy's.",
    "MiB: inputs, outputs and weights of the rank with most, one layer. borrowed: experts per layer, copies that each "
    "computes.",
)


def cost_table(rows: Sequence[LayerCost]) -> tuple[list[str], list[str]]:
    """Heading and a row per policy."""

    def column(group: str, title: str, form: str, values: Sequence[float | None]) -> Column:
        return Column(group, title, ["-" if value is None else format(value, form) for value in values])

    first = rows[0].layer_us_mean
    return table(
        [
            Column("", "policy", [row.policy for row in rows]),
            column("µs, busiest rank", "compute", ".1f", [row.compute_us for row in rows]),
            column("µs, busiest rank", "all-to-all", ".1f", [row.exchange_us for row in rows]),
            column("µs, busiest rank", "import", ".1f", [row.import_us for row in rows]),
            column("µs, layer", "mean", ".1f", [row.layer_us_mean for row in rows]),
            column("µs, layer", "max", ".1f", [row.layer_us_max for row in rows]),
            column("µs, layer", "change", "+.1%", [row.layer_us_mean / first - 1 for row in rows]),
            column("MiB, fullest rank", "mean", ".1f", [row.bytes_mean / MIB for row in rows]),
            column("MiB, fullest rank", "max", ".1f", [row.bytes_max / MIB for row in rows]),
            column("borrowed", "experts", ".1f", [row.borrowed for row in rows]),
            column("borrowed", "copies", ".0f", [row.copies_per_borrowed for row in rows]),
        ]
    )


def constants(model: CostModel) -> list[str]:
    """Every constant of a cost model, and the break-even of a borrow."""
    near, far = model.bandwidths
    sizes = ", ".join(f"{us:g} at {size}" for size, us in model.token_us)
    pays = model.break_even
    return [
        f"constants: {model.source}",
        f"expert {model.hidden} x {model.intermediate}, {model.matrices} matrices, {model.weight_bytes:g} B per "
        f"weight ({model.expert_bytes / MIB:.1f} MiB), {model.token_bytes:g} B per activation; "
        f"µs: {model.overhead_us:g} per expert in use, per copy {sizes} copies; "
        f"{near:g} GB/s inside a node, {far:g} between nodes",
        f"a borrow pays from {pays[0]} copies inside a node, {pays[1]} between nodes, if nothing hides the transfer",
    ]


def warnings(rows: Sequence[LayerCost], model: CostModel) -> list[str]:
    """Borrows that cost more than they save, and batches too small for any."""
    least = min(model.break_even)
    found = [
        f"{row.policy}: a borrowed expert computes {row.copies_per_borrowed:.0f} copies, "
        "its transfer takes longer than they do"
        for row in rows
        if row.copies_per_borrowed is not None and row.copies_per_borrowed < least
    ]
    if (copies := rows[0].mean_copies) < least:
        found.append(f"a rank has {copies:.0f} copies per batch and layer, mean: too few for a borrow to pay")
    return found


def print_cost(rows: Sequence[LayerCost], model: CostModel, console: Console) -> None:
    console.print()
    print_lines(console, constants(model), "bold")
    print_table(console, *cost_table(rows))
    print_lines(console, UNITS, "dim")
    print_lines(console, warnings(rows, model), "yellow")
