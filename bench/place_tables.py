"""The tables of docs/placement.md, from bench/results/bench_place.jsonl and bench_grace.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Table = tuple[str, list[list[str]]]


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def rows_of(table: str) -> list[dict[str, Any]]:
    return [row for row in read("bench_place") if row["table"] == table]


def place_unseen() -> Table:
    """Imbalance of unseen batches by placer."""
    flash = {(row["trace"], row["ranks"]): row for row in rows_of("flash") if "even" in row}
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows_of("unseen"):
        cases.setdefault((row["trace"], row["ranks"], row["slots"]), {})[row["placer"]] = row
    rows = []
    for (trace, ranks, slots), cell in cases.items():
        figures = [
            f"{cell[p]['even']:.3f} / {cell[p]['exact']:.3f}" for p in ("eplb", "search=False", "scenario")
        ]
        rival = flash.get((trace, ranks)) if "left out" not in trace else None
        figures.insert(1, f"{rival['even']:.3f} / {rival['exact']:.3f}" if rival else "-")
        rows.append([trace, f"{ranks} x {slots}", *figures, f"{cell['split=exact']['exact']:.3f}"])
    head = (
        "trace | ranks x slots | `eplb` | FlashLB-like | `search=False` | `scenario` | `split=exact`, exact"
    )
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


def place_slots() -> Table:
    """Imbalance of unseen batches after `exact`, by slots of a rank."""
    cases: dict[tuple[Any, ...], dict[tuple[str, int], str]] = {}
    for row in rows_of("slots"):
        found = cases.setdefault((row["trace"], row["ranks"]), {})
        found[row["placer"], row["slots"]] = f"{row['exact']:.3f}"
    rows = []
    for (trace, ranks), found in cases.items():
        slots = sorted({size for _, size in found})
        for placer in ("eplb", "split=exact"):
            rows.append([trace, f"{ranks} x {slots[0]}", f"`{placer}`", *(found[placer, s] for s in slots)])
    return "trace | ranks x slots | placer | without more | 1 more | 2 more | 4 more", rows


def place_pinned() -> Table:
    """Imbalance of unseen batches after `exact`, homes pinned or not, beside `eplb`."""
    eplb = {(row["trace"], row["ranks"]): row for row in rows_of("unseen") if row["placer"] == "eplb"}
    cases: dict[tuple[Any, ...], dict[bool, str]] = {}
    for row in rows_of("pinned"):
        found = cases.setdefault((row["trace"], row["ranks"], row["slots"]), {})
        found[row["pinned"]] = f"{row['exact']:.3f}"
    rows = [
        [trace, f"{ranks} x {slots}", f"{eplb[trace, ranks]['exact']:.3f}", found[True], found[False]]
        for (trace, ranks, slots), found in cases.items()
    ]
    return "trace | ranks x slots | `eplb` | `split=exact:pinned=True` | `split=exact`", rows


def place_drawn() -> Table:
    """Imbalance of drawn tokens, `static` / `exact`, by placer."""
    cases: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows_of("drawn"):
        found = cases.setdefault((row["trace"], row["ranks"], row["slots"]), {})
        found[row["placer"]] = f"{row['static']:.3f} / {row['exact']:.3f}"
    placers = ("eplb", "scenario", "split=exact")
    rows = [[t, f"{r} x {s}", *(found[p] for p in placers)] for (t, r, s), found in cases.items()]
    return "trace | ranks x slots | `eplb` | `scenario` | `split=exact`", rows


GRACE_TRACES = {
    "dsv2lite_esft_law": "DeepSeek-V2-Lite",
    "gptoss20b_decode_mmlu": "gpt-oss-20b",
    "olmoe_mmlu_small": "OLMoE",
}


def place_grace() -> Table:
    """GRACE-MoE's components on 2 nodes of 2 ranks."""
    rows = []
    for row in read("bench_grace"):
        if row["ranks"] != 4 or row["trace"] not in GRACE_TRACES:
            continue
        loss = " LOSS" if row.get("met") is False else ""
        rows.append(
            [
                GRACE_TRACES[row["trace"]] if row["variant"] == "in order" else "",
                row["variant"] + loss,
                f"{row['rank_rows']:.0f} ({100 * row['rank_rows_change']:+.0f} %)",
                f"{row['node_rows']:.0f} ({100 * row['node_rows_change']:+.0f} %)",
                f"{row['deviation']:.3f}",
                f"{100 * row['idle_share']:.1f} %",
            ]
        )
    return "trace | variant | rows to other ranks | to other nodes | load deviation | idle share", rows


def took(row: dict[str, Any]) -> str:
    ms = f"{row['ms']:.0f}" if row["ms"] >= 100 else f"{row['ms']:.2g}"
    return ms if row["ms"] <= row["goal"] else f"{ms} LOSS"


def place_times() -> Table:
    """Planner times against their goals, and memory, with the load of the machine when times were taken."""
    more = {row["ranks"]: row for row in rows_of("memory") if row["placer"] == "split=exact"}
    rows = []
    for row in rows_of("times"):
        if row["placer"] != "eplb":
            continue
        same = [other for other in rows_of("times") if other["ranks"] == row["ranks"]]
        memory = f"{more[row['ranks']]['planning_mb']:.0f}"
        cells = [took(other) for other in same]
        rows.append([f"{row['ranks']} x {row['slots']}", *cells, memory, f"{row['load']:.0f}"])
    head = "ranks x slots | `eplb`, ms | `search=False`, ms | `scenario`, ms | `split=exact`, ms | memory, MB | load"
    return head, rows


def place_recorder() -> Table:
    """What recording adds to a layer's call, by the ranks that a process owns."""
    rows = [
        [str(row["owned_ranks"]), f"{row['us_a_layer']:.1f}", f"{row['load']:.0f}"]
        for row in rows_of("recorder")
    ]
    return "ranks of the process | µs a layer | load", rows


PLACE_TABLES = {
    table.__name__: table
    for table in (
        place_unseen,
        place_slots,
        place_pinned,
        place_drawn,
        place_budgets,
        place_moves,
        place_groups,
        place_times,
        place_recorder,
        place_grace,
    )
}
