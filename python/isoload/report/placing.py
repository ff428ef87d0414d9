"""The table and the JSON of ``isoload place``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from isoload.placement import Placement
from isoload.replay.judge import Judged
from isoload.report.tables import Figure, json_of, print_lines, print_table, table_of

FIGURES = (
    Figure("placer", "", "placer", ""),
    Figure("even", "unseen imbalance", "even", ".3f"),
    Figure("exact", "unseen imbalance", "exact", ".3f"),
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


def print_place(
    placement: Placement, path: str, calibrate: str, rows: Sequence[Judged], console: Console
) -> None:
    topology = placement.topology
    slots = f"{placement.slots_per_rank} slots on each of {topology.num_ranks} ranks"
    print_lines(console, [f"{path}: {placement.num_layers} layers, {placement.num_routed} experts, {slots}"])
    print_table(console, *table_of(FIGURES, rows))
    seen = "the same batches were seen" if calibrate == "all" else "on batches that were not placed on"
    print_lines(
        console,
        [
            f"Imbalance: max/mean rank load, mean over batches and layers, {seen} (calibrate {calibrate}); even: "
            "replicas share alike, exact: the best split, as isoload's policy exact makes it. The file is made of all "
            "batches. Files given with --before or --against may have seen the judged ones.",
        ],
    )
