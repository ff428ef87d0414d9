"""The pages of ``isoload replay``, ``inspect`` and ``place``: the figures of their --json, the loads, and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isoload.analysis import pages as charts
from isoload.analysis.pages import figure, page, prose, section
from isoload.topology import over_mean

if TYPE_CHECKING:
    from isoload.analysis.metrics import Tally
    from isoload.analysis.simulate import Replay
    from isoload.placement.placement import Placement
    from isoload.traces import Trace

MOST = 96  # limit of the columns of batches in a heat map
MEAN = "Max/mean rank load, mean over batches; 1 is even."
ROWS = "A row is a token's vector that travels once to each rank where it has an expert."
Rows = Sequence[dict[str, Any]]


def replay_page(replay: Replay, what: Sequence[str], tables: str, notes: Sequence[str], figures: Any) -> str:
    rows, layers = replay.policies, replay.settings["layer_ids"]
    tallies = {tally.policy: tally for tally in replay.tallies}
    best = min(rows, key=lambda row: row.imbalance_mean)
    shown = dict.fromkeys((rows[0].policy, best.policy))
    counted = best.remote_rank_share is not None
    kind, said = ("rows", ROWS) if counted else ("copies", "A copy is a token and one of its experts.")
    series = {name: _imbalance(tally) for name, tally in tallies.items()}
    parts = [
        lines("Imbalance by layer", MEAN, series, layers, best=best.policy),
        leaving(f"Where {kind} go", said, {row.policy: _leaving(row) for row in rows}),
        *(part for name in shown for part in rank_heats(name, np.stack(tallies[name].loads), layers)),
        *(sending_heat(name, np.sum(tallies[name].rank_rows, 0)) for name in shown if counted),
    ]
    lead = [
        f"The busiest rank has {best.imbalance_mean:.3f} times the mean under {best.policy}, "
        f"{rows[0].imbalance_mean:.3f} times under {rows[0].policy}; mean over batches and layers.",
        f"That is {100 * best.gap_mean:+.2f} % from the proved bound of this placement, mean over both.",
    ]
    body = [section("Policies", tables), section("Loads by rank", *parts), _notes(notes)]
    heading = f"{best.policy}: {best.imbalance_mean:.3f} × the mean"
    return page(f"isoload replay: {replay.trace}", what, heading, lead, body, figures)


def _leaving(row: Any) -> tuple[float, float]:
    if row.remote_rank_share is not None:
        return row.remote_rank_share, row.remote_node_share
    return row.remote_rank_copy_share, row.remote_node_copy_share


def _imbalance(tally: Tally) -> Any:
    """Return [L] mean over batches; 1 if a layer has no copies."""
    return over_mean(np.stack(tally.loads).max(-1), np.stack(tally.means)).mean(0)


def inspect_page(
    trace: Trace, num_ranks: int, rows: Rows, what: Sequence[str], costs: Sequence[str], tables: str,
    notes: Sequence[str], figures: Any,
) -> str:  # fmt: skip
    """Return the page; costs: lines about the imbalance that the skew causes."""
    from isoload.analysis.inspection import ranks_in_order

    layers, on = trace.layer_ids, [row["on_ranks"][str(num_ranks)] for row in rows]
    series = {key.replace("_", " "): [cost[key] for cost in on] for key in ("in_order", "least")}
    said = f"{MEAN} On {num_ranks} ranks; least: of any placement without replicas."
    hottest = {"hottest": [row["expert_max_over_mean"] for row in rows]}
    batches = np.array([row["rank"]["per_batch"] for row in rows]) * num_ranks
    parts = [
        lines("Imbalance by layer", said, series, layers),
        lines("The hottest expert", "Its copies over the mean, all batches.", hottest, layers, y="max/mean expert"),
        heat("Rank loads", "Load of each rank over the mean, all batches.",
             over_mean(ranks_in_order(trace.batch_counts().sum(0), num_ranks)), layers),
        batch_heat(batches, layers),
    ]  # fmt: skip
    heading = f"{np.mean(series['in order']):.2f} × the mean on {num_ranks} ranks"
    body = [section("Loads by rank", *parts), section("Layers", tables), _notes(notes)]
    lead = ["Load of the busiest rank over the mean, mean of the layers:", *costs]
    return page(f"isoload inspect: {trace.name}", what, heading, lead, body, figures)


def placement_page(
    trace: Trace, placement: Placement, view: dict[str, Any], what: Sequence[str], tables: str,
    notes: Sequence[str], figures: Any,
) -> str:  # fmt: skip
    """Return the page of ``inspect --placement``."""
    from isoload.analysis.judge import even_loads

    rows, layers = view["layers"], trace.layer_ids
    keys = "in_order", "placed", "replicated", "exact"
    series = {key.replace("_", " "): [row[key] for row in rows] for key in keys}
    means = {name: float(np.mean(values)) for name, values in series.items()}
    by_number = {"all layers": view["balancedness_by_replicas"]}
    mine = placement.for_trace(trace)
    loads = even_loads(mine, trace.batch_counts())[..., mine.topology.live_ranks]
    unit = "mean/max rank load"
    parts = [
        lines("Balancedness by layer", "Mean over batches; 1 is even.", series, layers, y=unit, best="exact"),
        lines("Balancedness by replicas", "Packed as eplb does.", by_number, view["replicas"],
              "replicas of a layer", unit),
        *rank_heats("even split over replicas", loads, layers),
    ]  # fmt: skip
    lead = [
        f"With an even split over replicas, ranks are {means['replicated']:.3f} balanced; with the exact "
        f"split, {means['exact']:.3f}.",
        f"Experts in order are {means['in order']:.3f} balanced, placed without replicas {means['placed']:.3f}.",
    ]
    body = [section("Loads by rank", *parts), section("Layers", tables), _notes(notes)]
    heading = f"Balanced to {means['exact']:.3f}"
    return page(f"isoload inspect: {trace.name}", what, heading, lead, body, figures)


def place_page(
    trace: Trace, placement: Placement, rows: Rows, what: str, tables: str, notes: Sequence[str], figures: Any
) -> str:
    from isoload.analysis.judge import even_loads

    values = {row["placer"]: {"even": row["even"], "exact": row["exact"]} for row in rows}
    said = f"{MEAN} even: copies spread evenly over replicas; exact: the best split."
    cells = [(name, *(f"{x:.3f}" for x in imbalances.values())) for name, imbalances in values.items()]
    spec = charts.points(values, "max/mean rank load", (charts.LINES[0], charts.OWN))
    by_placer = figure("Imbalance by placer", said, spec, ("placer", "even", "exact"), cells)
    loads = even_loads(placement, trace.batch_counts())
    heats = rank_heats("even split over replicas", loads, trace.layer_ids)
    written = next(row for row in rows if row["written"])
    others = [f"{row['placer']} {row['even']:.3f}" for row in rows if row is not written]
    lead = [
        f"The busiest rank has {written['exact']:.3f} times the mean under {written['placer']} with the exact split "
        f"over replicas, and {written['even']:.3f} times with the even split.",
        f"Other placers, with the even split: {'; '.join(others)}.",
    ]
    body = [section("Placers", tables, by_placer), section("Loads by rank", *heats), _notes(notes)]
    heading = f"{written['placer']}: {written['exact']:.3f} × the mean"
    return page("isoload place", [what], heading, lead, body, figures)


def _notes(notes: Sequence[str]) -> str:
    return section("Definition of these figures", prose(notes))


def lines(
    title: str,
    said: str,
    series: Mapping[str, Any],
    at: Sequence[int],
    x: str = "layer",
    y: str = "max/mean rank load",
    best: str = "",
) -> str:
    """Return a line chart: [n] values of each name, over n numbers."""
    rows = [(n, *(f"{values[i]:.3f}" for values in series.values())) for i, n in enumerate(at)]
    floats = {name: list(map(float, values)) for name, values in series.items()}
    spec = charts.by_number(floats, at, x, y, best)
    return figure(title, said, spec, (x, *series), rows)


def heat(title: str, said: str, values: Any, layers: Sequence[int], across: str = "rank") -> str:
    """Return a heat map of [L, n] values that are 1 for even ranks."""
    header = "layer", *(f"{across} {i}" for i in range(values.shape[1]))
    rows = [(layer, *(f"{value:.2f}" for value in row)) for layer, row in zip(layers, values, strict=True)]
    return figure(title, said, charts.heat(values, layers, across, "layer"), header, rows)


def rank_heats(name: str, loads: Any, layers: Sequence[int]) -> list[str]:
    """Return heat maps of loads [B, L, R]: the mean over batches, and the maximum."""
    ratio, said = over_mean(loads), "Load of each rank over the mean of all ranks, "
    return [
        heat(f"Rank loads, {name}", f"{said}mean over batches.", ratio.mean(0), layers),
        heat(f"Rank loads, {name}, worst batch", f"{said}the largest of any batch.", ratio.max(0), layers),
    ]


def batch_heat(imbalance: Any, layers: Sequence[int]) -> str:
    """Return a heat map of max/mean rank load [L, B]; many batches are merged into columns of neighbours."""
    batches = imbalance.shape[1]
    parts = np.array_split(imbalance, min(batches, MOST), axis=1)
    size = f", mean of up to {-(-batches // MOST)} neighbours" if batches > MOST else ""
    means = np.stack([part.mean(1) for part in parts], 1)
    said = f"Max/mean rank load of each layer and batch{size}."
    return heat("Imbalance over time", said, means, layers, "batch" if not size else "part")


def sending_heat(name: str, sent: Any) -> str:
    """Return a heat map of [R, R] rows that each rank sends to each."""
    share = np.asarray(sent, dtype=np.float64) / max(float(np.mean(sent)), 1e-300)
    ranks = range(len(share))
    header = "from", *(f"to {i}" for i in ranks)
    values = [(i, *(f"{value:.2f}" for value in row)) for i, row in enumerate(share)]
    said = "Rows from a rank (down) to a rank (across) over the mean of all pairs; all layers and batches."
    spec = charts.heat(share, ranks, "to rank", "from rank")
    return figure(f"Rows between ranks, {name}", said, spec, header, values)


def leaving(title: str, said: str, parts: Mapping[str, tuple[float, float]]) -> str:
    """Return a chart of the fractions that leave their rank and their node, by name."""
    nodes, shares = any(node > 0 for _, node in parts.values()), dict[str, dict[str, float]]()
    for name, (rank, node) in parts.items():
        away = {"own node": rank - node, "other nodes": node} if nodes else {"other ranks": rank}
        shares[name] = {"own rank": 1 - rank, **away}
    header = "", *next(iter(shares.values()))
    rows = [(name, *(f"{100 * x:.1f} %" for x in values.values())) for name, values in shares.items()]
    return figure(title, said, charts.shares(shares), header, rows)
