"""Tables and JSON of what the command line finds."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from isoload.demo import DemoFigures
from isoload.doctor import Item
from isoload.inspection import HIGH_SKEW, LargestShare, LayerStats
from isoload.metrics import PolicyFigures
from isoload.simulate import Replay
from isoload.trace import Trace

WIDTH = 110

UNITS = (
    "imbalance: max/mean rank load. max load over: exact's bound here (mean, worst), ceil(total/R).",
    "idle: sum(max - load) / (R max). std: / mean. row: token x rank. copy: token x expert. One CPU thread.",
)
SHARED_UNITS = (
    UNITS[0].replace("exact's", "joint's"),
    UNITS[1],
    "Shared copies that leave their rank; unvisited: to a rank where the token has no routed copy.",
)


class Column(NamedTuple):
    """A table column; neighbours of one group share a heading above their titles."""

    group: str
    title: str
    cells: Sequence[str]


def table(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Two heading lines and a line per row: the first column left, the others right."""
    blocks: list[list[str]] = []
    for group, members in groupby(columns, key=lambda column: column.group):
        inside = []
        for column in members:
            width = max(map(len, (column.title, *column.cells)))
            lines = [column.title, *column.cells]
            inside.append([f"{line:<{width}}" if not blocks else f"{line:>{width}}" for line in lines])
        joined = [" ".join(parts) for parts in zip(*inside, strict=True)]
        width = max(len(group), len(joined[0]))
        blocks.append([f"{group:^{width}}", *(f"{line:>{width}}" for line in joined)])
    lines = ["  ".join(parts).rstrip() for parts in zip(*blocks, strict=True)]
    return lines[:2], lines[2:]


def percent(share: float) -> str:
    """0% is exactly zero, 0.0% is not."""
    return "0%" if share == 0 else f"{100 * share:.1f}%"


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
        print_lines(console, ["Below the bound: who borrows has slots that the bound does not count."], "dim")


def inspect_table(layers: Sequence[LayerStats]) -> tuple[list[str], list[str]]:
    """Heading and a row per layer of an inspection."""

    def share(group: str, of: Callable[[LayerStats], LargestShare]) -> list[Column]:
        return [
            Column(group, "hottest", [str(of(layer).hottest) for layer in layers]),
            Column(group, "all", [percent(of(layer).total) for layer in layers]),
            Column(group, "mean", [percent(of(layer).mean) for layer in layers]),
            Column(group, "max", [percent(of(layer).max) for layer in layers]),
        ]

    return table(
        [
            Column("", "layer", [str(layer.layer_id) for layer in layers]),
            *share("largest share of an expert", lambda layer: layer.expert),
            *share("largest share of a rank", lambda layer: layer.rank),
            Column("max/mean", "expert", [f"{layer.expert_max_over_mean:.2f}" for layer in layers]),
            Column("max/mean", "rank", [f"{layer.imbalance:.2f}" for layer in layers]),
            Column("", "class", [layer.skew for layer in layers]),
        ]
    )


def print_inspection(trace: Trace, num_ranks: int, layers: Sequence[LayerStats], console: Console) -> None:
    model = f" ({trace.provenance['model']})" if trace.provenance.get("model") else ""
    shape = f"{trace.num_batches} batches, {trace.num_layers} layers, {trace.num_experts} experts"
    ranks = f"experts in order on {num_ranks} ranks, no replicas"
    print_lines(console, [f"{trace.name}{model}", f"{shape}; {ranks}"], "bold")
    print_table(console, *inspect_table(layers))
    expert, rank = max(layer.expert.max for layer in layers), max(layer.rank.max for layer in layers)
    high = sum(layer.skew == "high-skew" for layer in layers)
    notes = [
        f"largest in any layer and batch: expert {percent(expert)}, rank {percent(rank)}",
        f"high-skew (hottest expert > {HIGH_SKEW:g} x mean): {high} of {len(layers)} layers",
        "hottest, all, max/mean: all batches as one. mean, max: of each batch's largest share.",
    ]
    print_lines(console, notes, "dim")


def demo_table(rows: Sequence[DemoFigures]) -> tuple[list[str], list[str]]:
    """Heading and a row per policy of the demo."""
    return table(
        [
            Column("", "policy", [row.policy for row in rows]),
            Column("busiest rank", "rows", [f"{row.busiest_rank_rows:.1f}" for row in rows]),
            Column("busiest rank", "CPU ms", [f"{row.busiest_rank_cpu_ms:.1f}" for row in rows]),
            Column("all ranks", "bytes sent", [f"{row.bytes_sent}" for row in rows]),
            Column("", "plan µs", [f"{row.plan_us:.1f}" for row in rows]),
            Column(
                "against the dense layer", "largest difference", [f"{row.max_abs_diff:.1e}" for row in rows]
            ),
        ]
    )


def print_demo(num_ranks: int, rows: Sequence[DemoFigures], console: Console) -> None:
    print_lines(
        console, [f"one MoE layer over {num_ranks} processes (gloo), forward, recorded routing"], "bold"
    )
    print_table(console, *demo_table(rows))
    print_lines(console, ["rows: per batch, mean. CPU ms, bytes: all batches. float32."], "dim")


def print_doctor(items: Sequence[Item], console: Console) -> None:
    width = max(len(item.name) for item in items)
    for item in items:
        line = Text(f"{item.name:<{width}}  ").append(
            f"{'on' if item.on else 'off':<3}", "green" if item.on else "yellow"
        )
        console.print(line.append(f"  {item.detail}"), soft_wrap=True)


def print_table(console: Console, heading: list[str], rows: list[str]) -> None:
    console.print()
    for line in heading:
        _print(console, line, "cyan")
    for line in rows:
        _print(console, line)
    console.print()


def print_lines(console: Console, lines: Sequence[str], style: str = "") -> None:
    """Prints lines broken at 110 columns."""
    for line in lines:
        for part in textwrap.wrap(line, WIDTH):
            _print(console, part, style)


def _print(console: Console, line: str, style: str = "") -> None:
    # Text and soft_wrap: no markup in names, and a pipe gets the line as it is.
    console.print(Text(line, style), soft_wrap=True)


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


def check_target(target: str | None) -> None:
    """Refuses a JSON file in a folder that does not exist, before any work is done for it."""
    if target in (None, "-"):
        return
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"json must be a file in an existing folder or -, got {target!r}")


def write_json(value: Any, target: str) -> None:
    """Writes JSON to stdout ("-") or to a file, which appears whole or not at all."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if target == "-":
        print(text, end="")
        return
    path = Path(target)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
