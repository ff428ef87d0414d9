"""What bench_llep found, as tables; then where LLEP loses, and the target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from llep_setting import TIMED

Row = dict[str, Any]
TARGET, TARGET_AT = 1.05, (0.95, 1)  # busiest / ideal at this share into so many experts
CONSOLE = Console(width=165)


def show(rows: list[Row]) -> None:
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    for kind, table in (("layer", show_layers), ("sweep", show_sweeps), ("grouped", show_grouped)):
        table(by_kind.get(kind, []))
    show_processes(by_kind.get("processes", []))
    show_target(by_kind.get("layer", []))
    show_losses(by_kind.get("layer", []))


def groups(rows: Sequence[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Neighbours that agree in these columns."""
    for found, group in itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys)):
        yield found, list(group)


def by_policy(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["policy"]: row for row in rows}


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i < 2)
    return table


def scaled(row: Row) -> str:
    sizes = f"{row['ranks']} ranks, {row['tokens_per_rank']} tokens per rank, {row['hidden']} x {row['intermediate']}"
    return f"{sizes} (tokens / {row['tokens_scale']}, widths / {row['width_scale']})"


LAYER = {  # column: (key, unit, format)
    "busiest ms": ("busiest_ms", 1, ".2f"),
    "/ ideal": ("ratio", 1, ".2f"),
    "GEMMs / ideal": ("gemms_ratio", 1, ".2f"),
    "copies": ("copies_ratio", 1, ".3f"),
    "over mean": ("over_mean", 1, ".2f"),
    "borrow ms": ("borrow_ms", 1, ".2f"),
    "plan us": ("plan_ms", 1e-3, ".0f"),
    "moved": ("moved", 1, ".0f"),
    "weights MB": ("weight_bytes", 1e6, ".2f"),
    "rows": ("rows_left", 1, ".0f"),
    "MB": ("row_bytes", 1e6, ".1f"),
    "most rows": ("busiest_rows", 1, ".0f"),
    "peak MB": ("peak_bytes", 1e6, ".1f"),
    "pool MB": ("pool_bytes", 1e6, ".1f"),
}


def show_layers(rows: Sequence[Row]) -> None:
    for (shape, form), group in groups(rows, "shape", "form"):
        table = new_table(f"{shape}, {form}: {scaled(group[0])}", "tokens into experts", "policy", *LAYER)
        for (share, num_hot), cell in groups(group, "share", "num_hot"):
            for i, row in enumerate(cell):
                cells = [f"{row[k] / unit:{how}}" if k in row else "" for k, unit, how in LAYER.values()]
                cells = ["out of memory"] if "out_of_memory" in row else cells
                table.add_row("" if i else f"{share:.0%} into {num_hot}", row["policy"], *cells)
        CONSOLE.print(table)


def show_sweeps(rows: Sequence[Row]) -> None:
    columns = (
        "EP ms",
        "LLEP ms",
        "borrow ms",
        "EP / LLEP",
        "GEMMs alone",
        "LLEP / ideal",
        "copies",
        "moved",
        "weights MB",
    )
    for (sweep, share), group in groups(rows, "sweep", "share"):
        table = new_table(f"{group[0]['shape']}, {sweep}: {share:.0%} into 4", sweep, *columns)
        for (value,), cell in groups(group, "value"):
            if any("out_of_memory" in row for row in cell):
                table.add_row(f"{value:g}", "out of memory")
                continue
            ep, llep = (by_policy(cell)[name] for name in TIMED)
            whole = llep["busiest_ms"] + llep["borrow_ms"]
            times = ep["busiest_ms"], llep["busiest_ms"], llep["borrow_ms"], ep["busiest_ms"] / whole
            table.add_row(
                f"{value:g}",
                *(f"{t:.2f}" for t in (*times, ep["gemms_ms"] / llep["gemms_ms"], llep["ratio"])),
                f"{ep['copies_ratio']:.2f} to {llep['copies_ratio']:.2f}",
                f"{llep['moved']}",
                f"{llep['weight_bytes'] / 1e6:.2f}",
            )
        CONSOLE.print(table)


def show_grouped(rows: Sequence[Row]) -> None:
    if not rows:
        return
    title = f"equal FLOPs: {rows[0]['tokens']} tokens, {rows[0]['width']} x {rows[0]['width']}"
    table = new_table(title, "experts", "one GEMM per expert, ms", "grouped, ms")
    for (experts,), group in groups(rows, "experts"):
        table.add_row(f"{experts}", *(f"{row['ms']:.2f}" for row in group))
    CONSOLE.print(table)


def show_processes(rows: Sequence[Row]) -> None:
    columns = ("forward ms", "backward ms", "borrow ms", "rows", "forward MB", "backward MB", "moved")
    columns += ("weights MB", "again MB", "returned MB", "forward peak MB", "training peak MB")
    for (shape,), group in groups(rows, "shape"):
        title = f"{shape}, distinct, processes, weights by {group[0]['borrow']}: {scaled(group[0])}"
        table = new_table(title, "tokens into experts", "policy", *columns)
        for (share, num_hot), cell in groups(group, "share", "num_hot"):
            for i, row in enumerate(cell):
                sizes = ("forward", "backward"), ("borrow_weight", "again_weight", "returned_weight")
                peaks = ("forward_peak", "training_peak")
                table.add_row(
                    "" if i else f"{share:.0%} into {num_hot}",
                    row["policy"],
                    *(f"{row[k]:.2f}" for k in ("forward_ms", "backward_ms", "borrow_ms")),
                    f"{row['rows_sent']:.0f}",
                    *(f"{row[k + '_bytes'] / 1e6:.1f}" for k in sizes[0]),
                    f"{row['moved']:.0f}",
                    *(f"{row[k + '_bytes'] / 1e6:.2f}" for k in (*sizes[1], *peaks)),
                )
        CONSOLE.print(table)


def show_target(rows: Sequence[Row]) -> None:
    for row in rows:
        if (row["share"], row["num_hot"], row["policy"]) != (*TARGET_AT, "LLEP") or "out_of_memory" in row:
            continue
        met = "met" if row["ratio"] <= TARGET else "missed"
        rest, ideal_rest = row["busiest_ms"] - row["gemms_ms"], row["ideal_ms"] - row["ideal_gemms_ms"]
        print(
            f"95 % into one expert, {row['shape']}, {row['form']}: busiest / ideal {row['ratio']:.2f} (target "
            f"{TARGET} {met}): copies {row['copies_ratio']:.3f}, GEMMs {row['gemms_ratio']:.2f}, sorting and adding "
            f"up copies {rest / ideal_rest:.2f} ({rest:.1f} of {row['busiest_ms']:.1f} ms)"
        )


LOSSES = {  # title, unit
    "rows_left": ("rows", 1.0),
    "row_bytes": ("row MB", 1e6),
    "busiest_rows": ("busiest rows", 1.0),
    "peak_bytes": ("peak MB", 1e6),
    "plan_ms": ("plan us", 1e-3),
}


def show_losses(rows: Sequence[Row]) -> None:
    """Per cell what LLEP has more of than EP, and the link from which on the weights pay if nothing hides them."""
    for keys, cell in groups(rows, "shape", "form", "share", "num_hot"):
        found = by_policy(cell)
        ep, llep = (found[name] for name in TIMED)
        if "out_of_memory" in ep or "out_of_memory" in llep:
            continue
        lost = [
            f"{title} {llep[k] / unit:.3g} for {ep[k] / unit:.3g}"
            for k, (title, unit) in LOSSES.items()
            if llep[k] > 1.005 * ep[k]
        ]
        saved = ep["busiest_ms"] - llep["busiest_ms"]
        lent = llep["most_exports"] * llep["weight_bytes"] / max(1, llep["moved"])
        if not llep["moved"]:
            weights = "plain EP: nothing moved, nothing saved"
        elif saved <= 0:
            weights = f"no compute saved for {lent / 1e6:.2f} MB of weights lent by one rank"
        else:
            weights = f"{saved:.1f} ms saved pay for the weights from {lent / saved / 1e6:.2f} GB/s on"
        shape, form, share, num_hot = keys
        print(
            f"{shape}, {form}, {share:.0%} into {num_hot}: {weights}; loses in",
            "; ".join(lost) or "nothing else",
        )
