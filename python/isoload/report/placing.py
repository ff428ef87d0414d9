"""The table and the JSON of ``isoload place``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from isoload.placement import Placement
from isoload.replay.judge import Judged
from isoload.report.tables import Figure, json_of, print_lines, print_table, table_of

NO_FREEDOM = (
    "Every expert has one slot, so no policy has a choice: --slots-per-rank {more} gives each rank a replica."
)
FIGURES = (
    Figure("placer", "", "placer", ""),
    Figure("even", "imbalance", "even", ".3f"),
    Figure("exact", "imbalance", "exact", ".3f"),
    Figure("replicas", "", "replicas", ""),
    Figure("replica_bytes", "replicas on a rank", "MiB", "MiB"),
    Figure("changed", "slots", "changed", "%"),
)


def place_json(placement: Placement, calibrate: str, rows: Sequence[Judged]) -> dict[str, Any]:
    """The JSON object of ``isoload place --json``."""
    return {
        "calibrate": calibrate,
        "provenance": placement.provenance,
        "placers": [json_of(FIGURES, row) for row in rows],
    }


def placement_line(placement: Placement, path: str) -> str:
    """What a file holds."""
    slots = f"{placement.slots_per_rank} slots on each of {placement.topology.num_ranks} ranks"
    return f"{path}: {placement.num_layers} layers, {placement.num_routed} experts, {slots}"


def print_place(
    placement: Placement, path: str, calibrate: str, rows: Sequence[Judged], console: Console
) -> None:
    print_lines(console, [placement_line(placement, path)])
    print_table(console, *table_of(FIGURES, rows))
    seen = "Seen batches" if calibrate == "all" else "Unseen batches"
    print_lines(
        console,
        [
            f"{seen} (calibrate {calibrate}): max/mean rank load, mean over batches and layers. even: replicas share "
            "alike; exact: the best split, as isoload's policy exact makes it. The file is made of all batches; files "
            "given with --before or --against may have seen the judged ones.",
        ],
    )
    if not any(placement.has_freedom):
        print_lines(console, [NO_FREEDOM.format(more=placement.slots_per_rank + 1)], "yellow")
