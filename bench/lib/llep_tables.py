"""What bench_llep found, as tables; then where LLEP loses, and the target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from lib import table
from lib.llep_setting import TIMED

Row = dict[str, Any]
TARGET, TARGET_AT = 1.05, (0.95, 1)  # busiest / ideal at this share into so many experts


def show(rows: list[Row]) -> None:
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    for (shape, form), group in groups(by_kind.get("layer", []), "shape", "form"):
        table.show(f"{shape}, {form}: {scaled(group[0])}", {**WHERE, **LAYER}, group)
    for (sweep, share), group in groups(by_kind.get("sweep", []), "sweep", "share"):
        title = f"{group[0]['shape']}, {sweep}: {share:.0%} into 4"
        table.show(title, {sweep: "{value:g}", "policy": "{policy}", **LAYER}, group)
    if grouped := by_kind.get("grouped", []):
        title = f"equal FLOPs: {grouped[0]['tokens']} tokens, {grouped[0]['width']} x {grouped[0]['width']}"
        table.show(title, {"experts": "{experts}", "path": "{path}", "ms": "{ms:.2f}"}, grouped)
    for (shape,), group in groups(by_kind.get("processes", []), "shape"):
        title = f"{shape}, distinct, processes, weights by {group[0]['borrow']}: {scaled(group[0])}"
        table.show(title, {**WHERE, **PROCESSES}, group)
    show_target(by_kind.get("layer", []))
    show_losses(by_kind.get("layer", []))


def groups(rows: Sequence[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Neighbours that agree in these columns."""
    for found, group in itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys)):
        yield found, list(group)


def by_policy(rows: Sequence[Row]) -> dict[str, Row]:
    return {row["policy"]: row for row in rows}


def scaled(row: Row) -> str:
    sizes = f"{row['ranks']} ranks, {row['tokens_per_rank']} tokens per rank, {row['hidden']} x {row['intermediate']}"
    return f"{sizes} (tokens / {row['tokens_scale']}, widths / {row['width_scale']})"


WHERE: table.Columns = {
    "tokens into experts": "{share:.0%} into {num_hot}",
    "policy": lambda row: row["policy"] + (": out of memory" if "out_of_memory" in row else ""),
}
LAYER: table.Columns = {
    "busiest ms": "{busiest_ms:.2f}",
    "/ ideal": "{ratio:.2f}",
    "GEMMs / ideal": "{gemms_ratio:.2f}",
    "copies": "{copies_ratio:.3f}",
    "over mean": "{over_mean:.2f}",
    "borrow ms": "{borrow_ms:.2f}",
    "plan us": "{plan_ms:.0f*1e3}",
    "moved": "{moved:.0f}",
    "weights MB": "{weight_bytes:.2f/1e6}",
    "rows": "{rows_left:.0f}",
    "MB": "{row_bytes:.1f/1e6}",
    "most rows": "{busiest_rows:.0f}",
    "peak MB": "{peak_bytes:.1f/1e6}",
    "pool MB": "{pool_bytes:.1f/1e6}",
}
PROCESSES: table.Columns = {
    **{f"{name} ms": f"{{{name}_ms:.2f}}" for name in ("forward", "backward", "borrow")},
    "rows": "{rows_sent:.0f}",
    **{f"{name} MB": f"{{{name}_bytes:.1f/1e6}}" for name in ("forward", "backward")},
    "moved": "{moved:.0f}",
    "weights MB": "{borrow_weight_bytes:.2f/1e6}",
    "again MB": "{again_weight_bytes:.2f/1e6}",
    "returned MB": "{returned_weight_bytes:.2f/1e6}",
    **{f"{name} peak MB": f"{{{name}_peak_bytes:.2f/1e6}}" for name in ("forward", "training")},
}


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
