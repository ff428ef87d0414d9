"""What bench_dispatch prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib import table
from lib.dispatch_stages import STAGES

Row = dict[str, Any]


def show(rows: Sequence[Row]) -> None:
    """A table per shape, phase and routing; a whole time beside the limit's."""
    limits = {(r["shape"], r["phase"]): r["ms"]["whole"] for r in rows if r["routing"] == "even"}
    columns: table.Columns = {
        "policy": "{policy}",
        "busiest / ideal": "{busiest_over_ideal:.3f}",
        **table.same(STAGES, "{ms[NAME]:.3f}"),
        "GB/s": lambda row: f"{row['weights_gb_per_s']:.1f}" if row["weights_gb_per_s"] else "",
        "whole": "{ms[whole]:.3f}",
        "/ even": lambda row: f"{row['ms']['whole'] / limits[row['shape'], row['phase']]:.2f}",
    }
    for key in dict.fromkeys((r["shape"], r["phase"], r["routing"]) for r in rows):
        own = [r for r in rows if (r["shape"], r["phase"], r["routing"]) == key]
        head = f"{', '.join(key)}: {own[0]['ranks']} ranks, {own[0]['tokens_per_rank']} tokens each; ms"
        table.show(head, columns, [row for row in own if "not_run" not in row])
        print(*(f"{row['policy']}: not run, {row['not_run']}" for row in own if "not_run" in row), sep="\n")
