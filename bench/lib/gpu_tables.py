"""The tables of docs/results-gpu.md: what bench_cuda, bench_kernels and bench_dispatch measured on a GPU."""

from __future__ import annotations

from lib.result_tables import Row, read, shown
from lib.table import Columns, Table, table

SIZES = {(16, 128): "128", (16, 4096): "4,096", (16, 16384): "16,384", (64, 4096): "4,096, 64 ranks"}
OPS = (
    *("floor: one word", "count", "plan_exact", "route", "chain", "balancer"),
    *("balance_own", "balance_same", "plan_lp", "plan_waterfill", "plan_joint", "plan_active"),
    *("top_up", "route_shared"),
)


@shown
def gpu_ops() -> Table:
    """Microseconds in a captured graph, by tokens of a rank; what is planned from loads does not depend on them."""
    rows: dict[str, Row] = {name: {"op": name} for name in OPS}
    for row in read("bench_cuda"):
        if row["op"] in rows and (row["ranks"], row["tokens"]) in SIZES:
            rows[row["op"]][SIZES[row["ranks"], row["tokens"]]] = f"{row['in_graph_us']:.1f}"
            rows[row["op"]].setdefault("target", row.get("target_us"))
            rows[row["op"]].setdefault("quoted", row.get("quoted_us"))
    columns: Columns = {
        "op": "`{op}`",
        **{name: lambda row, size=name: row.get(size, "") for name in SIZES.values()},
        "our target": lambda row: f"{row['target']:.0f}" if row.get("target") else "",
        "others, of their own": lambda row: row.get("quoted") or "",
    }
    return table(columns, rows.values())


@shown
def gpu_layer() -> Table:
    """One layer by policy: busiest rank over ideal, time of its experts, speed of moved weights."""
    policies = ("none", "static", "dynamic", "lp", "exact", "llep", "hedge")
    cells: dict[str, dict[str, str]] = {policy: {"policy": policy} for policy in policies}
    for row in read("bench_dispatch_cuda_local"):
        if "ms" in row and row["routing"] == "made" and row["policy"] in policies:
            speed = f", {row['weights_gb_per_s']:.0f} GB/s" if row["weights_gb_per_s"] else ""
            figures = f"{row['busiest_over_ideal']:.3f}, {row['ms']['experts']:.2f} ms{speed}"
            cells[row["policy"]][f"{row['shape']}, {row['phase']}"] = figures
    places = [name for name in cells["none"] if name != "policy"]
    columns: Columns = {
        "policy": "`{policy}`",
        **{place: lambda cell, place=place: cell[place] for place in places},
    }
    return table(columns, cells.values())
