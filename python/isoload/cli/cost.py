"""What --cost takes: a cost model, its constants in words, and the table of a replay's predicted layer times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from isoload.cli.tables import MIB, Figure, Row, columns_of, say

if TYPE_CHECKING:
    from isoload.times.cost import CostModel

UNITS = (
    "µs: predicted, of the busiest rank, one layer. layer = compute + all-to-all + import: nothing hides anything. "
    "change: of the layer's mean, from the first policy's.",
    "MiB: inputs, outputs and weights of the rank with most, one layer. borrowed: experts per layer, copies that each "
    "computes.",
)


def given_cost(given: str | None) -> CostModel | None:
    """The constants of a file, the built-in ones, or none."""
    from isoload.times.cost import CostModel, read_cost

    if given is None:
        return None
    return CostModel() if given == "default" else read_cost(given)


FIGURES = (
    Figure("policy", "", "policy"),
    Figure("compute_us", "µs, busiest rank", "compute", ".1f", wide=True),
    Figure("exchange_us", "µs, busiest rank", "all-to-all", ".1f", wide=True),
    Figure("import_us", "µs, busiest rank", "import", ".1f", wide=True),
    Figure("layer_us_mean", "µs, layer", "mean", ".1f"),
    Figure("layer_us_max", "µs, layer", "max", ".1f", wide=True),
    Figure("layer_us_change", "µs, layer", "change", "+.1%"),
    Figure("bytes_mean", "MiB, fullest rank", "mean", "MiB", wide=True),
    Figure("bytes_max", "MiB, fullest rank", "max", "MiB"),
    Figure("borrowed", "borrowed", "experts", ".1f"),
    Figure("copies_per_borrowed", "borrowed", "copies", ".0f", wide=True),
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


def warnings(rows: Sequence[Row], model: CostModel) -> list[str]:
    """Borrows that cost more than they save, and batches too small for any."""
    least = min(model.break_even)
    found = [
        f"{row['policy']}: a borrowed expert computes {row['copies_per_borrowed']:.0f} copies, "
        "its transfer takes longer than they do"
        for row in rows
        if row["copies_per_borrowed"] is not None and row["copies_per_borrowed"] < least
    ]
    if (copies := rows[0]["mean_copies"]) < least:
        found.append(f"a rank has {copies:.0f} copies per batch and layer, mean: too few for a borrow to pay")
    return found


def print_cost(rows: Sequence[Row], model: CostModel, console: Console, wide: bool = False) -> None:
    console.print()
    columns, found = columns_of(FIGURES, rows, wide), warnings(rows, model)
    say(console, ("bold", constants(model)), columns, ("dim", UNITS), ("yellow", found))
