"""The tables of docs/results-gpu.md: what bench_cuda, bench_kernels and bench_dispatch measured on a GPU."""

from __future__ import annotations

from lib.result_tables import Row, read, shown
from lib.table import Columns, Table, table

SIZES = {(16, 128): "128", (16, 4096): "4,096", (16, 16384): "16,384", (64, 4096): "4,096, 64 ranks"}
OPS = (
    *("floor: one word", "count", "plan_exact", "share, own row", "route", "chain", "balancer"),
    *("plan_own", "balance_own", "balance_same", "plan_lp", "plan_waterfill", "plan_joint", "plan_active"),
    *("top_up", "replica_tables", "round_split"),
    *("number_rows", "group_copies", "route_shared"),
)


@shown
def gpu_ops() -> Table:
    """Microseconds in a captured graph, by tokens of a rank; what is planned from loads does not depend on them."""
    rows: dict[str, Row] = {name: {"op": name} for name in OPS}
    for row in read("bench_cuda"):
        if row["op"] in rows:
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
def gpu_kernels() -> Table:
    """The Triton kernels against a copy of as many bytes."""
    columns: Columns = {
        "shape": "{shape}",
        "copies here": "{share:.0f*100} %",
        "kernel": "{kernel}",
        "µs": "{kernel_us:.0f}",
        "a copy of its bytes": "{roof_us:.0f}",
        "of the copy's speed": lambda row: f"{100 * row['roof_us'] / row['kernel_us']:.0f} %",
        "torch": "{torch_us:.0f}",
    }
    return table(columns, [row for row in read("bench_kernels") if "clamped" not in row["kernel"]])


@shown
def gpu_layer() -> Table:
    """One layer's stages by policy; routing made, 8 virtual ranks."""
    columns: Columns = {
        "layer": "{shape}, {phase}",
        "policy": "`{policy}`",
        "busiest rank / ideal": "{busiest_over_ideal:.3f}",
        "its experts, ms": "{ms[experts]:.2f}",
        "weights moved, GB/s": lambda row: (
            f"{row['weights_gb_per_s']:.0f}" if row["weights_gb_per_s"] else ""
        ),
    }
    policies = ("none", "static", "dynamic", "lp", "exact", "llep", "hedge")
    rows = [row for row in read("bench_dispatch_cuda_local") if "ms" in row and row["routing"] == "made"]
    return table(columns, [row for row in rows if row["policy"] in policies])
