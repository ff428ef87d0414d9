"""The tables of docs/results.md about fills made ahead and about local replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Table = tuple[str, list[list[str]]]
STREAMS = (
    ("DeepSeek-V2-Lite", 8, "even"),
    ("DeepSeek-V2-Lite", 8, "sequence"),
    ("gpt-oss-20b", 8, "even"),
    ("GLM-5.2", 8, "even"),
    ("GLM-5.2", 32, "even"),
)
FORECASTS = ("perfect", "0.8", "0.45", "0.12", "0.45 partner", "last", "linear", "path", "popularity")
FILLS = (
    ("hedge", 2),
    ("hedge", 4),
    ("hedge held", 2),
    ("libra:printed=True", 8),
    ("libra", 8),
    ("libra:split_by=exact", 8),
    ("lina", 8),
)


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def imbalances() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of bench_libra by (trace, ranks, deal, policy, spare slots, forecast)."""
    keys = ("trace", "ranks", "deal", "policy", "spare", "predict")
    rows = read("bench_libra")
    return {tuple(row[key] for key in keys): row for row in rows if row["table"] == "imbalance"}


def named(stream: tuple[str, int, str]) -> str:
    trace, ranks, deal = stream
    return f"{trace}, R={ranks}" + ("" if deal in ("even", "own") else f", by {deal}")


def ahead() -> Table:
    """Mean imbalance of fills by their forecast."""
    cells, rows = imbalances(), []
    for stream in STREAMS:
        for forecast in FORECASTS:
            found = [cells.get((*stream, *fill, forecast)) for fill in FILLS]
            if found[0]:
                figures = [f"{row['imbalance_mean']:.4f}" if row else "-" for row in found]
                rows.append([named(stream), forecast, *figures])
    fills = (
        "`hedge` 2",
        "`hedge` 4",
        "`hedge` held 2",
        "`libra` printed 8",
        "`libra` 8",
        "`libra` exact 8",
        "lina 8",
    )
    return f"stream | forecast | {' | '.join(fills)}", rows


def ahead_others() -> Table:
    """The same without a forecast: resident replicas, and fills from the true loads."""
    cells, rows = imbalances(), []
    columns = [("none", 2, "true loads")]
    columns += [
        (f"eplb {policy}", spare, "calibration")
        for policy in ("static", "dynamic", "exact")
        for spare in (2, 8)
    ]
    columns += [(policy, 2, "true loads") for policy in ("llep", "harmoeny")]
    for stream in STREAMS:
        rows.append(
            [named(stream), *(f"{cells[(*stream, *column)]['imbalance_mean']:.4f}" for column in columns)]
        )
    heads = [
        f"{policy.replace('eplb ', 'EPLB, ')}" + ("" if policy == "none" else f" {n}")
        for policy, n, _ in columns
    ]
    return f"stream | {' | '.join(heads)}", rows


def ahead_workloads() -> Table:
    """W0-W7."""
    cells, rows = imbalances(), []
    columns = (
        ("none", 2, "true loads"),
        ("eplb exact", 2, "calibration"),
        ("llep", 2, "true loads"),
        ("hedge", 2, "perfect"),
        ("hedge", 2, "0.45"),
        ("hedge", 2, "last"),
        ("libra:printed=True", 8, "perfect"),
        ("libra:printed=True", 8, "0.45"),
    )
    for stream in dict.fromkeys(key[:3] for key in cells if key[2] == "own"):
        rows.append(
            [stream[0], *(f"{cells[(*stream, *column)]['imbalance_mean']:.4f}" for column in columns)]
        )
    heads = (
        "none",
        "EPLB, exact 2",
        "llep 2",
        "`hedge` 2, perfect",
        "0.45",
        "last",
        "`libra` printed 8, perfect",
        "0.45",
    )
    return f"workload | {' | '.join(heads)}", rows


def ahead_costs() -> Table:
    """Local share, experts borrowed and bytes, of the first layers' fills where 80 % is right."""
    cells, rows = imbalances(), []
    sent = {
        (row["trace"], row["ranks"], row["deal"], row["policy"], row["spare"]): row
        for row in read("bench_libra")
        if row["table"] == "traffic"
    }
    for stream in STREAMS:
        for policy, spare in (("none", 2), ("libra", 8), ("hedge", 2), ("hedge", 8)):
            row = cells[(*stream, policy, spare, "true loads" if policy == "none" else "0.8")]
            moved = sent[(*stream, policy, spare)]
            rows.append(
                [
                    named(stream),
                    f"`{policy}` {spare}" if policy != "none" else "`none`",
                    f"{100 * row['local_mean']:.1f} %",
                    f"{row['imports_mean']:.1f}, {row['import_mb']:.0f}",
                    f"{moved['rows_per_token']:.2f}",
                    f"{moved['all_to_all_mb']:.1f}",
                    f"{moved['all_gather_mb']:.1f}",
                ]
            )
    head = "stream | fill | local copies | borrowed per rank, MB | rows sent per token | "
    return f"{head}all-to-all, MB | all-gather, MB", rows


def accuracy() -> Table:
    """Per expert and token."""
    found = [row for row in read("bench_libra") if row["table"] in ("accuracy", "other tasks")]
    cells = {(row["trace"], row["fitted"], row["predictor"]): row["accuracy"] for row in found}
    rows = []
    for trace, fitted in dict.fromkeys(key[:2] for key in cells):
        rows.append([trace, fitted, *(f"{cells[trace, fitted, kind]:.3f}" for kind in ("linear", "path"))])
    return "tokens | fitted on | `Linear` | `PathTable`", rows


def ahead_times() -> Table:
    rows = [
        [row["op"], f"{row['us']:.1f}", f"{row['slowest_us']:.1f}", str(row["goal_us"])]
        for row in read("bench_ahead")
    ]
    return "one call | median, us | slowest instance, us | goal, us", rows


def route() -> Table:
    """GRACE-MoE's routing beside exact splits."""
    policies = {
        "grace_sampled:locality=False": "weighted random",
        "grace_sampled": "locality first, drawn",
        "grace": "`grace`",
        "exact:objective=local:tolerance=0.0": "`exact`, local",
        "exact:objective=local:tolerance=0.05": "`exact`, local, 5 %",
        "exact:objective=local:tolerance=0.1": "`exact`, local, 10 %",
        "exact:objective=local:tolerance=0.2": "`exact`, local, 20 %",
    }
    rows = [
        [
            row["trace"],
            f"`{row['placer']}`, {row['replicas']:.1f}",
            policies[row["policy"]],
            *(f"{row[key]:.3f}" for key in ("rank_rows", "node_rows")),
            f"{100 * row['saved']:.0f}",
            *(f"{row[key]:.3f}" for key in ("imbalance", "deviation", "idle")),
        ]
        for row in read("bench_route")
        if row["policy"] in policies and row["deal"] == "even"
    ]
    head = "stream | placer, replicas | policy | rows that leave the rank | the node | saved, % | "
    return f"{head}imbalance | deviation | idle", rows


def loads() -> Table:
    """docs/balancing.md: the busiest rank by what a rank may know in the forward."""
    protocols = ("hash", "static", "last step, sampled", "last", "own", "own + targets", "node")
    found: dict[tuple[int, str, str], list[float]] = {}
    for row in read("bench_loads"):
        found.setdefault((row["tokens"], row["protocol"], row["dealing"]), []).append(row["mean"])
    rows = []
    for tokens in sorted({key[0] for key in found}):
        means = ([found[tokens, p, dealing] for dealing in ("hom", "het")] for p in protocols)
        rows.append([str(tokens), *(" / ".join(f"{sum(x) / len(x):.3f}" for x in of) for of in means)])
    return f"tokens of a rank | {' | '.join(protocols)}", rows


AHEAD_TABLES = {
    table.__name__: table
    for table in (ahead, ahead_others, ahead_workloads, ahead_costs, accuracy, ahead_times, route, loads)
}
