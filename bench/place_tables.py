"""The tables of docs/placement.md, from bench/results/bench_place.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "bench_place.jsonl"
Table = tuple[str, list[list[str]]]


def rows_of(table: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [row for row in rows if row["table"] == table]


def place_unseen() -> Table:
    """Imbalance of unseen batches by placer."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows_of("unseen"):
        cases.setdefault((row["trace"], row["ranks"], row["slots"]), {})[row["placer"]] = row
    rows = []
    for (trace, ranks, slots), cell in cases.items():
        figures = [
            f"{cell[p]['even']:.3f} / {cell[p]['exact']:.3f}" for p in ("eplb", "search=False", "scenario")
        ]
        rows.append([trace, f"{ranks} x {slots}", *figures, f"{cell['split=exact']['exact']:.3f}"])
    head = "trace | ranks x slots | `eplb` | `search=False` | `scenario` | `split=exact`, exact"
    return head, rows


def place_budgets() -> Table:
    """Replica budgets: imbalance of unseen batches."""
    rows = [
        [
            row["trace"],
            str(row["ranks"]),
            f"{row['replicas_of_a_rank']} ({100 * row['share']:.0f} %)",
            *(f"{other['even']:.3f}" for other in rows_of("budgets") if same_budget(row, other)),
            f"{row['eplb']:.3f}",
        ]
        for row in rows_of("budgets")
        if row["placer"] == "scenario"
    ]
    return "trace | ranks | replicas of a rank | `scenario` | `craft` | `eplb` with all", rows


def same_budget(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row[key] == other[key] for key in ("trace", "ranks", "replicas_of_a_rank"))


def place_moves() -> Table:
    """Re-planning with few changed slots."""
    rows = [
        [
            "from scratch" if row["moves"] is None else str(row["moves"]),
            f"{100 * row['changed']:.1f} %",
            f"{row['balance']:.3f}",
            f"{100 * row['of_scratch']:.1f} %",
        ]
        for row in rows_of("moves")
    ]
    return "moves | slots changed | balance of the next batches | of that from scratch", rows


def place_groups() -> Table:
    """Balance on the planned loads, and nodes per token, with expert groups."""
    rows = [
        [
            f"{row['ranks']} / {row['nodes']}",
            f"`{row['placer']}`",
            f"{row['balance']:.3f}",
            f"{row['nodes_per_token']:.2f}",
        ]
        for row in rows_of("groups")
    ]
    return "ranks / nodes | placer | balance, seen | nodes per token", rows


def place_times() -> Table:
    """Planner times, with the load of the machine when they were taken."""
    rows = [
        [
            f"{row['ranks']} x {row['slots']}",
            *(f"{other['ms']:.3g}" for other in rows_of("times") if other["ranks"] == row["ranks"]),
            f"{row['load']:.0f}",
        ]
        for row in rows_of("times")
        if row["placer"] == "eplb"
    ]
    return "ranks x slots | `eplb`, ms | `search=False`, ms | `scenario`, ms | `split=exact`, ms | load", rows


PLACE_TABLES = {
    table.__name__: table for table in (place_unseen, place_budgets, place_moves, place_groups, place_times)
}
