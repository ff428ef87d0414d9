"""``isoload replay``: recorded routing over virtual ranks, under several policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from isoload.cli import options
from isoload.cli.tables import NO_FREEDOM, Column, Figure, Row, columns_of, page_table, say, write_out

if TYPE_CHECKING:
    from isoload.analysis.metrics import PolicyFigures
    from isoload.analysis.simulate import Replay
    from isoload.times import Times

UNITS = (
    "imbalance: max/mean rank load, mean over batches and layers. bound: {best}'s here. row: token x rank. "
    "plan: per layer, median, one CPU thread. --wide shows all figures."
)
WIDE_UNITS = (
    "imbalance: max/mean rank load. max load over: {best}'s bound here (mean, worst), ceil(total/R). "
    "idle: sum(max - load) / (R max). std: / mean. row: token x rank; once: token x other node. "
    "copy: token x expert. plan: per layer, median, of a call for one layer and for all, one CPU thread."
)
SPEEDS = (
    "Ranks differ in speed: a load is the cost of its copies, {ticks} ticks each on a rank of speed 1; mean and "
    "ideal are for ranks that all end together."
)
BELOW = "Below the bound: policies that borrow have slots that the bound does not count."
BY_LOADS = "exact by loads {loads}, exchanged every {exchange_every} batches"
SHARED = "Shared copies that leave their rank; unvisited: to a rank where the token has no routed copy."

FIGURES = (
    Figure("policy", "", "policy"),
    Figure("imbalance.mean", "imbalance", "mean", ".3f"),
    Figure("imbalance.p99", "imbalance", "p99", ".3f", wide=True),
    Figure("imbalance.max", "imbalance", "max", ".3f", wide=True),
    Figure("gap.mean", "max load over", "bound", "%"),
    Figure("gap.max", "max load over", "worst", "%", wide=True),
    Figure("ideal_gap", "max load over", "ideal", "%", wide=True),
    Figure("idle_share", "rank load", "idle", "%", wide=True),
    Figure("rank_load_std", "rank load", "std", ".3f", wide=True),
    Figure("remote_rank_share", "rows leave", "rank", "%"),
    Figure("remote_node_share", "rows leave", "node", "%"),
    Figure("node_dispatch_share", "rows leave", "once", "%", wide=True),
    Figure("remote_rank_copy_share", "copies leave", "rank", "%", wide=True),
    Figure("remote_node_copy_share", "copies leave", "node", "%", wide=True),
    Figure("shared_remote_share", "shared copies", "leave", "%", wide=True),
    Figure("shared_unvisited_share", "shared copies", "unvisited", "%", wide=True),
    Figure("active_experts", "used", "slots", ".1f", wide=True),
    Figure("plan_us.median", "plan µs", "one", ".1f"),
    Figure("plan_us.batched", "plan µs", "batch", ".1f", wide=True),
)
TIMES = (
    Figure("policy", "", "policy"),
    Figure("experts_us", "µs, busiest rank", "experts", ".1f"),
    Figure("exchange_us_low", "all-to-all µs", "from", ".1f", wide=True),
    Figure("exchange_us_high", "all-to-all µs", "to", ".1f", wide=True),
    Figure("import_us", "µs, busiest rank", "import", ".1f", wide=True),
    Figure("layer_us_low", "layer µs", "from", ".1f"),
    Figure("layer_us_high", "layer µs", "to", ".1f"),
    Figure("layer_us_change", "layer µs", "change", "+.1%"),
    Figure("borrowed", "borrowed", "experts", ".1f"),
    Figure("copies_per_borrowed", "borrowed", "copies", ".0f", wide=True),
)
TIMES_UNITS = (
    "Modelled from {times.source}: experts of the busiest rank, dispatch and combine, and imports, one after the "
    "other, without planning. change: of the upper end, from the first policy's. borrowed: experts per layer."
)


def replay_columns(rows: Sequence[PolicyFigures], with_nodes: bool, wide: bool = False) -> list[Column]:
    """Return the columns of a replay's table, about nodes only for several; figures of shared copies replace others."""
    shared = any(row.shared_remote_share is not None for row in rows)
    shown = [f for f in FIGURES if not (shared and f.group == "copies leave")]
    shown = [f for f in shown if with_nodes or f.title not in ("node", "once")]
    return columns_of(shown, [row.to_json() for row in rows], wide)


def replay_header(replay: Replay, note: str = "") -> list[str]:
    """Return lines about the replayed batches and the placement, and whether it was made from these batches."""
    used = replay.settings
    model = f" ({used['model']})" if used["model"] else ""
    source = f"drawn from counts with seed {used['seed']}" if used["drawn"] else "routing as recorded"
    what, top_k = ("tokens", f", top-{used['top_k']}") if used["top_k"] else ("copies", "")
    nodes = used["num_ranks"] // used["ranks_per_node"]
    batches = " or ".join(map(str, used["calibration_batches"]))
    placer = f", placer {used['placer']}" if used["placer"] else ""
    calibrated = {
        None: "" if note else "a given placement",
        "interleaved": f"unseen: placed on {batches} batches between them",
        "first-half": f"unseen: placed on the first {batches} batches",
        "all": "seen: placed on the replayed batches",
        "leave-one-out": f"unseen: placed for each batch on the {batches} others",
        "leave-cluster-out": f"unseen: placed for each cluster on all others ({batches} batches)",
    }
    kinds = [f"{used[name]} {name.split('_')[0]}" for name in ("shared_experts", "spare_slots") if used[name]]
    reserved = f" ({', '.join(kinds)})" if kinds else ""
    return [
        f"{replay.trace}{model}",
        f"{replay.tokens} {what} in {replay.batches} batches, {source}; {replay.layers} layers, "
        f"{used['num_experts']} experts{top_k}",
        f"{used['num_ranks']} ranks on {nodes} node{'s' * (nodes > 1)}, {used['slots_per_rank']} slots per "
        f"rank{reserved}{placer}",
        f"{calibrated[used['calibrate']]}{note}",
        *([BY_LOADS.format(**used)] if "loads" in used else []),
    ]


def print_replay(replay: Replay, console: Console, wide: bool = False, note: str = "") -> None:
    with_nodes = replay.settings["num_ranks"] > replay.settings["ranks_per_node"]
    columns = replay_columns(replay.policies, with_nodes, wide)
    units, warnings = replay_units(replay, wide), replay_warnings(replay)
    say(console, ("bold", replay_header(replay, note)), columns, ("dim", units), ("yellow", warnings))


def replay_units(replay: Replay, wide: bool) -> list[str]:
    from isoload.topology import NOMINAL_TICKS

    used, shared = replay.settings, replay.settings["shared_experts"]
    units = (WIDE_UNITS if wide else UNITS).format(best="joint" if shared else "exact")
    borrowing = [row for row in replay.policies if row.policy != options.BASELINE]
    lines = [units, *([SHARED] if shared and wide else [])]
    lines += [SPEEDS.format(ticks=NOMINAL_TICKS)] if used.get("speeds") else []
    return lines + ([BELOW] if any(row.gap_mean < 0 for row in borrowing) else [])


def replay_warnings(replay: Replay) -> list[str]:
    """Return notes on figures that cannot be judged here, with reasons."""
    warnings = [f"{policy}: n/a: {reason}" for policy, reason in replay.refused.items()]
    if not replay.settings["top_k"]:
        warnings.append(
            "The record does not state top-k: copies are drawn one by one, rows are not counted (--top-k)."
        )
    warnings += replay.notes
    if replay.settings.get("exchanges") == 0:
        warnings.append("Nothing was exchanged: there are no more batches than --exchange-every.")
    if not replay.settings["layers_with_freedom"]:
        warnings.append(NO_FREEDOM.format(more=replay.settings["slots_per_rank"] + 1))
    return warnings


def times_warnings(rows: Sequence[Row], times: Times) -> list[str]:
    """Return warnings about borrows that cost more than they save, and about batches too small for any borrow."""
    least = times.break_even or 0
    warnings = [
        f"{row['policy']}: a borrowed expert computes {row['copies_per_borrowed']:.0f} copies, which takes less time "
        "than its transfer"
        for row in rows
        if row["copies_per_borrowed"] is not None and row["copies_per_borrowed"] < least
    ]
    if (copies := rows[0]["mean_copies"]) < least:
        warnings.append(
            f"a borrow pays from {least} copies, and a rank has {copies:.0f} in a batch and layer, mean"
        )
    return warnings


def replay_json(replay: Replay) -> Row:
    """Return the JSON object of ``isoload replay --json``; with times, every policy's row has a layer's time."""
    rows = [row.to_json() for row in replay.policies]
    for row, predicted in zip(rows, replay.layer_times, strict=False):
        row["predicted"] = predicted
    for row, tally in zip(rows, replay.tallies, strict=False):  # a Replay made by hand may have none
        row["by_batch"] = tally.by_batch()
    names = ("trace", "settings", "tokens", "layers", "batches")
    refused = {"refused": replay.refused} if replay.refused else {}
    return {name: getattr(replay, name) for name in names} | {"policies": rows} | refused


def replay(
    context: typer.Context,
    traces: options.TracePaths,
    ranks: options.Ranks = 8,
    ranks_per_node: options.RanksPerNode = 0,
    slots_per_rank: options.SlotsPerRank = 0,
    spare_slots: Annotated[
        int, options.Range(0), Option(help="Slots of every rank that stay empty, for borrowed experts.")
    ] = 0,
    shared_experts: Annotated[
        int,
        options.Range(0),
        Option(help="Shared experts that every token needs in addition; every rank holds each."),
    ] = 0,
    placer: options.PlacerName = "eplb",
    placement: Annotated[
        str | None,
        Option(metavar="FILE", help="Replay this placement on all batches; without it a placement is made."),
    ] = None,
    calibrate: Annotated[
        str | None,
        Option(
            help=f"Batches from which the placement is made: {options.CALIBRATIONS}. The remaining batches "
            f"are replayed. "
            f"{options.CALIBRATE_DEFAULT} With --placement: all; another rule makes placements by the file's placer "
            "from the batches that are not replayed."
        ),
    ] = None,
    top_k: options.TopK = None,
    batch_tokens: Annotated[
        int | None,
        options.Range(1),
        Option(help="Tokens per batch. Default: the trace's own, else 1024 (drawn: at most 4096)."),
    ] = None,
    max_batches: Annotated[
        int,
        options.Range(0),
        Option(help="Number of batches replayed per calibration, from the first on. 0: all."),
    ] = 0,
    assign: Annotated[
        str, Option(help=f"How whole sequences are assigned to source ranks: {options.ASSIGNMENTS}.")
    ] = "contiguous",
    seed: Annotated[
        int, options.Range(0), Option(help="Seed of drawn tokens and of policies that sample.")
    ] = 0,
    predict: Annotated[
        str,
        Option(
            help=f"Forecast of policies that fill spare slots ahead: {options.PREDICTIONS}, or a number: "
            f"the fraction of "
            "the choices that is predicted right."
        ),
    ] = "last",
    policies: Annotated[
        str | None,
        Option(
            help=f"Some of {options.POLICIES}, each with options as name:option=value; in-order: experts in order, no "
            "replicas, E/R slots per rank; all: every policy, with the reason if one does not accept this placement. "
            "none does not use the placement's replicas. "
            f"Default: {options.DEFAULT_POLICIES}; with shared experts {options.SHARED_POLICIES}."
        ),
    ] = None,
    loads: Annotated[
        str,
        Option(
            help=f"Loads from which exact plans: {options.LOADS}. Other policies plan from all ranks' loads."
        ),
    ] = "gathered",
    exchange_every: Annotated[
        int,
        options.Range(1),
        Option(help="Number of batches between two exchanges, if loads are not gathered."),
    ] = 16,
    plugin: options.Plugins = None,
    layers: options.LayersText = None,
    times: Annotated[
        str | None,
        Option(metavar="FILE", help="File of isoload measure: adds a table of a layer's time by policy."),
    ] = None,
    wide: options.Wide = False,
    stages: options.Stages = False,
    same_layers: options.SameLayers = False,
    allow_missing_ranks: options.AllowMissingRanks = False,
    first_moe_layer: options.FirstMoeLayer = None,
    model: options.ModelLayers = None,
    json: options.JsonTarget = None,
    html: options.HtmlTarget = None,
    force: options.Force = False,
) -> None:
    """Replay recorded routing over virtual ranks, under several policies.

    Experts are placed by one part of the trace, and the rest is routed.

    Every figure is counted from routed slots. Imbalance is max/mean rank load. The standard deviation is relative to
    the mean, the idle share to R*max. Planning time is in microseconds per layer, on one CPU thread.

    If a trace has only counts, tokens are drawn from them, layer by layer: each token chooses K distinct experts. If
    K is not known, single copies are drawn.

    With --times a second table shows a layer's time on the GPUs that isoload measure timed; policies with a
    price for borrowed experts use these times, unless their options set others.
    """
    from isoload.analysis import simulate
    from isoload.cli import arguments
    from isoload.policies import POLICIES
    from isoload.times import load

    options.load_plugins(plugin)
    arguments.check_targets([*traces, placement, times], force, json, html=html)
    reading = arguments.Reading(stages, same_layers, allow_missing_ranks, first_moe_layer, model)
    placed = None if placement is None else reading.stated(arguments.given_placement(context, placement))
    if placed is not None:
        ranks, ranks_per_node = placed.topology.num_ranks, placed.topology.ranks_per_node
        spare_slots, shared_experts = placed.spare_slots, placed.num_shared
        slots_per_rank = placed.slots_per_rank
    chosen: tuple[str, ...] = simulate.SHARED_POLICIES if shared_experts else simulate.DEFAULT_POLICIES
    if policies is not None:
        names = [name.strip() for name in policies.split(",") if name.strip()]
        whole = {"in-order": (simulate.BASELINE,), "all": (simulate.BASELINE, *POLICIES)}
        chosen = tuple(dict.fromkeys(policy for name in names for policy in whole.get(name, (name,))))
    settings = simulate.ReplaySettings(
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        slots_per_rank=slots_per_rank,
        spare_slots=spare_slots,
        shared_experts=shared_experts,
        placer=placer,
        calibrate=calibrate,
        batch_tokens=batch_tokens,
        max_batches=max_batches,
        assign=assign,
        seed=seed,
        predict=predict,
        times=None if times is None else load(times),
        policies=chosen,
        loads=loads,  # type: ignore[arg-type]
        exchange_every=exchange_every,
        skip_refused=policies is not None and "all" in names,
    )
    loaded, note = arguments.load_trace(traces, layers, top_k, reading), ""
    if placed is not None:
        settings, placed, note = arguments.unseen_part(placed, str(placement), loaded, settings)
    with arguments.progress("replaying batches") as on_batch:
        replayed = simulate.replay(loaded, settings, on_batch, placed)
    rows = zip(replayed.policies, replayed.layer_times, strict=False)
    timed = [{"policy": row.policy, **row_times} for row, row_times in rows]
    figures = replay_json(replayed)

    def show(console: Console) -> None:
        say(console, ("", arguments.source_line([loaded])))
        print_replay(replayed, console, wide, note)
        if settings.times:
            units = [TIMES_UNITS.format(times=settings.times)]
            warnings = times_warnings(timed, settings.times)
            say(console, columns_of(TIMES, timed, wide), ("dim", units), ("yellow", warnings))

    def drawn() -> str:
        from isoload.cli.pages import replay_page

        with_nodes = replayed.settings["num_ranks"] > replayed.settings["ranks_per_node"]
        tables = page_table(replay_columns(replayed.policies, with_nodes, wide=True))
        notes = [*replay_units(replayed, wide=True), *replay_warnings(replayed)]
        if settings.times:
            tables += page_table(columns_of(TIMES, timed, wide=True))
            notes += [TIMES_UNITS.format(times=settings.times), *times_warnings(timed, settings.times)]
        return replay_page(replayed, replay_header(replayed, note), tables, notes, figures)

    write_out(json, figures, show, html=html, page=drawn)
