"""What bench_dispatch prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dispatch_stages import STAGES

Row = dict[str, Any]


def show(rows: Sequence[Row]) -> None:
    """A table per shape, phase and routing; a whole time beside the limit's."""
    limits = {(r["shape"], r["phase"]): r["ms"]["whole"] for r in rows if r["routing"] == "even"}
    titles = ("busiest / ideal", *STAGES, "GB/s", "whole", "/ even")
    for key in dict.fromkeys((r["shape"], r["phase"], r["routing"]) for r in rows):
        own = [r for r in rows if (r["shape"], r["phase"], r["routing"]) == key]
        head = f"{', '.join(key)}: {own[0]['ranks']} ranks, {own[0]['tokens_per_rank']} tokens each; ms"
        table = Table(title=head, title_justify="left")
        for title in ("policy", *titles):
            table.add_column(title, justify="left" if title == "policy" else "right")
        reasons = []
        for row in own:
            if "not_run" in row:
                reasons.append(f"{row['policy']}: not run, {row['not_run']}")
                continue
            ms, rate = row["ms"], row["weights_gb_per_s"]
            times = (f"{ms[stage]:.3f}" if stage in ms else "" for stage in STAGES)
            ends = (
                f"{rate:.1f}" if rate else "",
                f"{ms['whole']:.3f}",
                f"{ms['whole'] / limits[key[:2]]:.2f}",
            )
            table.add_row(row["policy"], f"{row['busiest_over_ideal']:.3f}", *times, *ends)
        Console(width=150).print(table)
        print(*reasons, sep="\n")
