"""The table and the JSON of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from isoload.replay.metrics import PolicyFigures
from isoload.replay.simulate import Replay
from isoload.report.tables import Column, percent, print_lines, print_table, table

UNITS = (
    "imbalance: max/mean rank load. max load over: exact's bound here (mean, worst), ceil(total/R).",
    "idle: sum(max - load) / (R max). std: / mean. row: token x rank. copy: token x expert. One CPU thread.",
)
SHARED_UNITS = (
    UNITS[0].replace("exact's", "joint's"),
    UNITS[1],
    "Shared copies that leave their rank; unvisited: to a rank where the token has no routed copy.",
)


def replay_table(rows: Sequence[PolicyFigures], with_nodes: bool) -> tuple[list[str], list[str]]:
    """Heading and rows of a replay; columns about nodes only where there are several."""

    def column(group: str, title: str, form: str, name: str) -> Column:
        values = [getattr(row, name) for row in rows]
        return Column(group, title, [percent(v) if form == "%" else format(v, form) for v in values])

    if any(row.shared_remote_share is not None for row in rows):
        copies = [
            column("shared copies", "leave", "%", "shared_remote_share"),
            column("shared copies", "unvisited", "%", "shared_unvisited_share"),
        ]
    else:
        copies = [
            column("copies leave", "rank", "%", "remote_rank_copy_share"),
            column("copies leave", "node", "%", "remote_node_copy_share"),
        ]
    columns = [
        column("", "policy", "", "policy"),
        column("imbalance", "mean", ".3f", "imbalance_mean"),
        column("imbalance", "p99", ".3f", "imbalance_p99"),
        column("imbalance", "max", ".3f", "imbalance_max"),
        column("max load over", "bound", "%", "gap_mean"),
        column("max load over", "worst", "%", "gap_max"),
        column("max load over", "ideal", "%", "ideal_gap"),
        column("rank load", "idle", "%", "idle_share"),
        column("rank load", "std", ".3f", "rank_load_std"),
        column("rows leave", "rank", "%", "remote_rank_share"),
        column("rows leave", "node", "%", "remote_node_share"),
        *copies,
        column("used", "slots", ".1f", "active_experts"),
        column("plan µs/layer", "one", ".1f", "plan_us_median"),
        column("plan µs/layer", "p99", ".0f", "plan_us_p99"),
        column("plan µs/layer", "batch", ".1f", "plan_us_batched"),
    ]
    return table([column for column in columns if with_nodes or column.title != "node"])


def replay_header(replay: Replay) -> list[str]:
    """What was replayed, and how."""
    used = replay.settings
    model = f" ({used['model']})" if used["model"] else ""
    source = f"drawn from counts with seed {used['seed']}" if used["drawn"] else "routing as recorded"
    nodes = used["num_ranks"] // used["ranks_per_node"]
    seen = " or ".join(map(str, used["calibration_batches"]))
    calibrated = {
        "first-half": f"calibrated on the first {seen} batches",
        "all": "calibrated on the replayed batches",
        "leave-one-out": f"calibrated for each batch on the {seen} others",
        "leave-cluster-out": f"calibrated for each cluster on the others ({seen} batches)",
    }
    kinds = [f"{used[name]} {name.split('_')[0]}" for name in ("shared_experts", "spare_slots") if used[name]]
    reserved = f" ({', '.join(kinds)})" if kinds else ""
    return [
        f"{replay.trace}{model}",
        f"{replay.tokens} tokens in {replay.batches} batches, {source}; {replay.layers} layers, "
        f"{used['num_experts']} experts, top-{used['top_k']}",
        f"{used['num_ranks']} ranks on {nodes} node{'s' * (nodes > 1)}, {used['slots_per_rank']} slots per "
        f"rank{reserved}, placer {used['placer']}, {calibrated[used['calibrate']]}",
    ]


def print_replay(replay: Replay, console: Console) -> None:
    heading, rows = replay_table(
        replay.policies, replay.settings["num_ranks"] > replay.settings["ranks_per_node"]
    )
    print_lines(console, replay_header(replay), "bold")
    print_table(console, heading, rows)
    print_lines(console, SHARED_UNITS if replay.settings["shared_experts"] else UNITS, "dim")
    if any(row.gap_mean < 0 for row in replay.policies):
        print_lines(
            console,
            ["Below the bound: policies that borrow have slots that the bound does not count."],
            "dim",
        )


def replay_json(replay: Replay) -> dict[str, Any]:
    """The JSON object of ``isoload replay --json``."""
    return {
        "trace": replay.trace,
        "settings": replay.settings,
        "tokens": replay.tokens,
        "layers": replay.layers,
        "batches": replay.batches,
        "policies": [
            {
                "policy": row.policy,
                "imbalance": {"mean": row.imbalance_mean, "p99": row.imbalance_p99, "max": row.imbalance_max},
                "rank_load_std": row.rank_load_std,
                "idle_share": row.idle_share,
                "gap": {"mean": row.gap_mean, "max": row.gap_max},
                "ideal_gap": row.ideal_gap,
                "remote_rank_rows": row.remote_rank_rows,
                "remote_node_rows": row.remote_node_rows,
                "remote_rank_share": row.remote_rank_share,
                "remote_node_share": row.remote_node_share,
                "active_experts": row.active_experts,
                "plan_us": {
                    "median": row.plan_us_median,
                    "p99": row.plan_us_p99,
                    "batched": row.plan_us_batched,
                },
                **predicted,
            }
            for row, predicted in zip(replay.policies, _predicted(replay), strict=True)
        ],
    }


def _predicted(replay: Replay) -> list[dict[str, Any]]:
    """What a cost model adds to the rows of the policies."""
    if not replay.costs:
        return [{}] * len(replay.policies)
    return [{"predicted": {k: v for k, v in asdict(row).items() if k != "policy"}} for row in replay.costs]
