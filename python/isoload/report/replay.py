"""The table and the JSON of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from isoload.replay.metrics import PolicyFigures
from isoload.replay.simulate import Replay
from isoload.report.cost import cost_json
from isoload.report.tables import Figure, json_of, print_lines, print_table, table_of
from isoload.topology import NOMINAL_TICKS

UNITS = (
    "imbalance: max/mean rank load. max load over: exact's bound here (mean, worst), ceil(total/R).",
    "idle: sum(max - load) / (R max). std: / mean. row: token x rank. copy: token x expert. One CPU thread.",
)
SHARED_UNITS = (
    UNITS[0].replace("exact's", "joint's"),
    UNITS[1],
    "Shared copies that leave their rank; unvisited: to a rank where the token has no routed copy.",
)
SPEEDS = (
    f"Ranks differ in speed: a load is what its copies cost, {NOMINAL_TICKS} ticks each on a rank of speed 1; mean and "
    "ideal are those of ranks that all end together."
)

FIGURES = (
    Figure("policy", "", "policy", ""),
    Figure("imbalance.mean", "imbalance", "mean", ".3f", "imbalance_mean"),
    Figure("imbalance.p99", "imbalance", "p99", ".3f", "imbalance_p99"),
    Figure("imbalance.max", "imbalance", "max", ".3f", "imbalance_max"),
    Figure("gap.mean", "max load over", "bound", "%", "gap_mean"),
    Figure("gap.max", "max load over", "worst", "%", "gap_max"),
    Figure("ideal_gap", "max load over", "ideal", "%"),
    Figure("idle_share", "rank load", "idle", "%"),
    Figure("rank_load_std", "rank load", "std", ".3f"),
    Figure("remote_rank_rows"),
    Figure("remote_node_rows"),
    Figure("remote_rank_share", "rows leave", "rank", "%"),
    Figure("remote_node_share", "rows leave", "node", "%"),
    Figure("remote_rank_copy_share", "copies leave", "rank", "%"),
    Figure("remote_node_copy_share", "copies leave", "node", "%"),
    Figure("shared_remote_share", "shared copies", "leave", "%"),
    Figure("shared_unvisited_share", "shared copies", "unvisited", "%"),
    Figure("active_experts", "used", "slots", ".1f"),
    Figure("plan_us.median", "plan µs/layer", "one", ".1f", "plan_us_median"),
    Figure("plan_us.p99", "plan µs/layer", "p99", ".0f", "plan_us_p99"),
    Figure("plan_us.batched", "plan µs/layer", "batch", ".1f", "plan_us_batched"),
)


def replay_table(rows: Sequence[PolicyFigures], with_nodes: bool) -> tuple[list[str], list[str]]:
    """Heading and rows of a replay.

    Columns about nodes stand only where there are several; what is said of shared copies stands in the place of what
    is said of all copies.
    """
    shared = any(row.shared_remote_share is not None for row in rows)
    hidden = "copies leave" if shared else "shared copies"
    shown = [f for f in FIGURES if f.group != hidden and (with_nodes or f.title != "node")]
    return table_of(shown, rows)


def replay_header(replay: Replay) -> list[str]:
    """What was replayed, and how."""
    used = replay.settings
    model = f" ({used['model']})" if used["model"] else ""
    source = f"drawn from counts with seed {used['seed']}" if used["drawn"] else "routing as recorded"
    nodes = used["num_ranks"] // used["ranks_per_node"]
    seen = " or ".join(map(str, used["calibration_batches"]))
    placed = f"placer {used['placer']}, " if used["placer"] else ""
    calibrated = {
        None: "a given placement",
        "interleaved": f"calibrated on {seen} batches between them",
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
        f"rank{reserved}, {placed}{calibrated[used['calibrate']]}",
    ]


def print_replay(replay: Replay, console: Console) -> None:
    heading, rows = replay_table(
        replay.policies, replay.settings["num_ranks"] > replay.settings["ranks_per_node"]
    )
    print_lines(console, replay_header(replay), "bold")
    print_table(console, heading, rows)
    print_lines(console, SHARED_UNITS if replay.settings["shared_experts"] else UNITS, "dim")
    if replay.settings.get("speeds"):
        print_lines(console, [SPEEDS], "dim")
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
            json_of(FIGURES, row) | predicted
            for row, predicted in zip(replay.policies, _predicted(replay), strict=True)
        ],
    }


def _predicted(replay: Replay) -> list[dict[str, Any]]:
    """What a cost model adds to the rows of the policies."""
    if not replay.costs:
        return [{}] * len(replay.policies)
    return [{"predicted": row} for row in cost_json(replay.costs)]
