"""``isoload demo``: one MoE layer over local processes, once per policy, against the dense layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isoload.cli.options import Force, JsonTarget
from isoload.cli.tables import Figure, Row, print_lines, print_table, table_of, write_out

FIGURES = (
    Figure("policy", "", "policy"),
    Figure("busiest_rank_rows", "busiest rank", "rows", ".1f"),
    Figure("busiest_rank_cpu_ms", "busiest rank", "CPU ms", ".1f"),
    Figure("bytes_sent", "all ranks", "bytes sent", "d"),
    Figure("plan_us", "", "plan µs", ".1f"),
    Figure("max_abs_diff", "against the dense layer", "largest difference", ".1e"),
)


def print_demo(num_ranks: int, rows: Sequence[Row], console: Console) -> None:
    print_lines(
        console, [f"one MoE layer over {num_ranks} processes (gloo), forward, recorded routing"], "bold"
    )
    print_table(console, *table_of(FIGURES, rows))
    print_lines(console, ["rows: per batch, mean. CPU ms, bytes: all batches. float32."], "dim")


def demo(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Default: the shipped one.")] = None,
    ranks: Annotated[int, typer.Option(help="R, processes to start.")] = 4,
    layer: Annotated[int, typer.Option(help="Layer whose routing is used, by position.")] = 12,
    stall_seconds: Annotated[
        float, typer.Option(help="A rank that ends no batch for so long has stalled, which ends the demo.")
    ] = 60.0,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Run one MoE layer over local processes, once per policy, and compare it with the dense layer."""
    from isoload.cli.demo_layer import run_demo
    from isoload.cli.targets import check_targets

    check_targets([trace], force, json)
    found = run_demo(trace, ranks, layer, stall_seconds)
    write_out(json, {"policies": found}, lambda console: print_demo(ranks, found, console))
