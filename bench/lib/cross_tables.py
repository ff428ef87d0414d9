"""Tables of docs/results-*.md and others in which a row joins many rows of a results file."""

from __future__ import annotations

from typing import Any

from isoload.engines.seams import ENGINE_SEAMS, version_ranges
from lib.result_tables import Row, by, read, shown
from lib.table import Columns, Table, same, table


def ends(values: Any) -> str:
    """From .. to, or what is printed alike once."""
    how = ",.0f" if max(values) >= 1000 else ".2f"
    return " .. ".join(dict.fromkeys(format(value, how) for value in (min(values), max(values))))


def ranged(row: Row, key: str) -> str:
    """With the row's unit; text as it stands."""
    if not isinstance(row[key], list):
        return row[key] or f"cannot be predicted: {row['not_known']}"
    return f"{ends(row[key])} {row['unit']}".rstrip()


PUBLISHED: Columns = {
    "what": "{what}",
    "source": "{source}",
    "theirs": lambda row: ranged(row, "theirs"),
    "ours": lambda row: ranged(row, "ours"),
    "error": lambda row: f"{100 * row['error']:+.0f} %{', inside' * row['inside']}" if row["ours"] else "-",
    "not known": lambda row: row["not_known"] if row["ours"] else "",
}
BOTH = "{NAME[even]:.3f} / {NAME[exact]:.3f}"


def placed(kind: str, last: str = "placer") -> list[dict[Any, Row]]:
    """Per trace, ranks and slots: rows of bench_place by placer; under "any" one of them."""
    cells = by(read("bench_place", kind), "trace", "ranks", "slots", last=last)
    return [cell | {"any": next(iter(cell.values()))} for cell in cells.values()]


WHERE: Columns = {"trace": "{any[trace]}", "ranks x slots": "{any[ranks]} x {any[slots]}"}


@shown
def place_unseen() -> Table:
    """Imbalance of unseen batches by placer."""
    flash = {(row["trace"], row["ranks"]): row for row in read("bench_place", "flash") if "even" in row}
    cells = placed("unseen")
    for cell in cells:
        rival = (
            None
            if "left out" in cell["any"]["trace"]
            else flash.get((cell["any"]["trace"], cell["any"]["ranks"]))
        )
        cell["rival"] = "-" if rival is None else f"{rival['even']:.3f} / {rival['exact']:.3f}"
    columns: Columns = {
        **WHERE,
        "`eplb`": BOTH.replace("NAME", "eplb"),
        "FlashLB-like": "{rival}",
        "`search=False`": BOTH.replace("NAME", "search=False"),
        "`scenario`": BOTH.replace("NAME", "scenario"),
        "`split=exact`, exact": "{split=exact[exact]:.3f}",
    }
    return table(columns, cells)


@shown
def place_slots() -> Table:
    """Imbalance of unseen batches after `exact`, by slots of a rank."""
    rows = []
    for (trace, ranks), cell in by(read("bench_place", "slots"), "trace", "ranks", last="slots").items():
        found = {
            (r["placer"], r["slots"]): r["exact"] for r in read("bench_place", "slots") if r["trace"] == trace
        }
        for placer in ("eplb", "split=exact"):
            figures = [f"{found[placer, size]:.3f}" for size in sorted(cell)]
            rows.append([trace, f"{ranks} x {min(cell)}", f"`{placer}`", *figures])
    return "trace | ranks x slots | placer | without more | 1 more | 2 more | 4 more", rows


@shown
def place_pinned() -> Table:
    """Imbalance of unseen batches after `exact`, homes pinned or not, beside `eplb`."""
    eplb = {
        (row["trace"], row["ranks"]): row for row in read("bench_place", "unseen") if row["placer"] == "eplb"
    }
    cells = placed("pinned", last="pinned")
    columns: Columns = {
        **WHERE,
        "`eplb`": lambda cell: f"{eplb[cell['any']['trace'], cell['any']['ranks']]['exact']:.3f}",
        "`split=exact:pinned=True`": lambda cell: f"{cell[True]['exact']:.3f}",
        "`split=exact`": lambda cell: f"{cell[False]['exact']:.3f}",
    }
    return table(columns, cells)


@shown
def place_drawn() -> Table:
    """Imbalance of drawn tokens, `static` / `exact`, by placer."""
    figures = "{NAME[static]:.3f} / {NAME[exact]:.3f}"
    placers = {
        f"`{placer}`": figures.replace("NAME", placer) for placer in ("eplb", "scenario", "split=exact")
    }
    return table({**WHERE, **placers}, placed("drawn"))


@shown
def place_budgets() -> Table:
    """Replica budgets: imbalance of unseen batches."""
    columns: Columns = {
        "trace": "{scenario[trace]}",
        "ranks": "{scenario[ranks]}",
        "replicas of a rank": "{scenario[replicas_of_a_rank]} ({scenario[share]:.0f*100} %)",
        "`scenario`": "{scenario[even]:.3f}",
        "`craft`": "{craft[even]:.3f}",
        "`eplb` with all": "{scenario[eplb]:.3f}",
    }
    cells = by(read("bench_place", "budgets"), "trace", "ranks", "replicas_of_a_rank", last="placer")
    return table(columns, list(cells.values()))


@shown
def craft_factors() -> Table:
    """CRAFT's replication factors: balance of unseen batches, what the two rules choose."""
    columns: Columns = {
        "experts": "{experts}",
        "ranks": "{ranks}",
        "R = 0": "{base:.3f}",
        **{str(factor): f"{{R{factor}:.3f}}" for factor in (1, 2, 4, 8, 16)},
        "`gain` takes": "{gain}",
        "`knee` takes": "{knee}: {at_knee:.3f}",
        "GiB of a rank": "{gib_at_knee:.2f}",
        "`eplb` with all": "{eplb:.3f}",
        "GiB": "{gib_eplb:.2f}",
    }
    return table(columns, read("bench_craft"))


@shown
def rebalance_placers() -> Table:
    """Placing anew while loads drift, by placer."""
    columns: Columns = {
        "placer": "`{placer}`",
        "imbalance, even split": "{even:.3f}",
        "after `exact`": "{exact:.3f}",
        "slots changed by a plan": "{changed:.1f*100} %",
    }
    return table(columns, [row for row in read("bench_rebalance") if "even" in row])


@shown
def rebalance_rule() -> Table:
    """An engine's rebalances with and without ISOLOAD_REBALANCE, on steady and on drifting traffic."""
    columns: Columns = {
        "traffic": "{traffic}",
        "placer": "`{placer}`",
        "ISOLOAD_REBALANCE": "{rule}",
        "rebalances": "{moves}",
        "slots changed": "{changed:.1f*100} %",
        "saved, s": "{gain_s:.1f}",
        "moves take, s": "{cost_s:.1f}",
    }
    return table(columns, [row for row in read("bench_rebalance") if "rule" in row])


def took(row: Row) -> str:
    ms = f"{row['ms']:.0f}" if row["ms"] >= 100 else f"{row['ms']:.2g}"
    return ms if row["ms"] <= row["goal"] else f"{ms} LOSS"


@shown
def place_times() -> Table:
    """Planner times against their goals, and memory, with the load of the machine when times were taken."""
    memory = by(read("bench_place", "memory"), "ranks", last="placer")
    cells = by(read("bench_place", "times"), "ranks", last="placer")
    columns: Columns = {
        "ranks x slots": "{eplb[ranks]} x {eplb[slots]}",
        **{
            f"`{placer}`, ms": lambda cell, placer=placer: took(cell[placer])
            for placer in ("eplb", "search=False", "scenario", "split=exact")
        },
        "memory, MB": lambda cell: f"{memory[cell['eplb']['ranks'],]['split=exact']['planning_mb']:.0f}",
        "load": "{eplb[load]:.0f}",
    }
    return table(columns, list(cells.values()))


STREAMS = (
    ("DeepSeek-V2-Lite", 8, "even"),
    ("DeepSeek-V2-Lite", 8, "sequence"),
    ("gpt-oss-20b", 8, "even"),
    ("GLM-5.2", 8, "even"),
    ("GLM-5.2", 32, "even"),
)
FORECASTS = ("perfect", "0.8", "0.45", "0.12", "0.45 partner", "last", "linear", "path", "popularity")
FILLS = {
    "`hedge` 2": ("hedge", 2),
    "`hedge` 4": ("hedge", 4),
    "`hedge` 2, local kept": ("hedge held", 2),
    "`libra_published` 8": ("libra_published", 8),
    "`libra` 8": ("libra", 8),
    "lina 8": ("lina", 8),
}


def imbalances() -> dict[tuple[Any, ...], Row]:
    """Rows of bench_libra by (trace, ranks, deal, policy, spare slots, forecast)."""
    keys = ("trace", "ranks", "deal", "policy", "spare", "predict")
    return {tuple(row[key] for key in keys): row for row in read("bench_libra", "imbalance")}


def named(stream: tuple[str, int, str]) -> str:
    trace, ranks, deal = stream
    return f"{trace}, R={ranks}" + ("" if deal in ("even", "own") else f", by {deal}")


def mean(row: Row | None) -> str:
    return f"{row['imbalance_mean']:.4f}" if row else "-"


@shown
def ahead() -> Table:
    """Mean imbalance of fills by their forecast."""
    cells, rows = imbalances(), []
    for stream in STREAMS:
        for forecast in FORECASTS:
            found = [cells.get((*stream, *fill, forecast)) for fill in FILLS.values()]
            if found[0]:
                rows.append([named(stream), forecast, *map(mean, found)])
    return f"stream | forecast | {' | '.join(FILLS)}", rows


@shown
def ahead_others() -> Table:
    """The same without a forecast: resident replicas, and fills from the true loads."""
    cells, columns = imbalances(), {"none": ("none", 2, "true loads")}
    for policy in ("static", "dynamic", "exact"):
        columns |= {f"EPLB, {policy} {n}": (f"eplb {policy}", n, "calibration") for n in (2, 8)}
    columns |= {f"{policy} 2": (policy, 2, "true loads") for policy in ("llep", "harmoeny")}
    rows = [[named(s), *(mean(cells[(*s, *of)]) for of in columns.values())] for s in STREAMS]
    return f"stream | {' | '.join(columns)}", rows


@shown
def ahead_workloads() -> Table:
    """W0-W7."""
    cells = imbalances()
    columns = (
        ("none", ("none", 2, "true loads")),
        ("EPLB, exact 2", ("eplb exact", 2, "calibration")),
        ("llep 2", ("llep", 2, "true loads")),
        ("`hedge` 2, perfect", ("hedge", 2, "perfect")),
        ("0.45", ("hedge", 2, "0.45")),
        ("last", ("hedge", 2, "last")),
        ("`libra_published` 8, perfect", ("libra_published", 8, "perfect")),
        ("0.45", ("libra_published", 8, "0.45")),
    )
    streams = dict.fromkeys(key[:3] for key in cells if key[2] == "own")
    rows = [[s[0], *(mean(cells[(*s, *of)]) for _, of in columns)] for s in streams]
    return f"workload | {' | '.join(head for head, _ in columns)}", rows


@shown
def ahead_costs() -> Table:
    """Local share, experts borrowed and bytes, of the first layers' fills where 80 % is right."""
    cells, rows = imbalances(), []
    sent = by(read("bench_libra", "traffic"), "trace", "ranks", "deal", "policy", last="spare")
    for stream in STREAMS:
        for policy, spare in (("none", 2), ("libra", 8), ("hedge", 2), ("hedge", 8)):
            row = cells[(*stream, policy, spare, "true loads" if policy == "none" else "0.8")]
            name = f"`{policy}` {spare}" if policy != "none" else "`none`"
            rows.append(row | sent[(*stream, policy)][spare] | {"stream": named(stream), "fill": name})
    columns: Columns = {
        **same(("stream", "fill"), "{NAME}"),
        "local copies": "{local_mean:.1f*100} %",
        "borrowed per rank, MB": "{imports_mean:.1f}, {import_mb:.0f}",
        "rows sent per token": "{rows_per_token:.2f}",
        "all-to-all, MB": "{all_to_all_mb:.1f}",
        "all-gather, MB": "{all_gather_mb:.1f}",
    }
    return table(columns, rows)


@shown
def accuracy() -> Table:
    """Per expert and token."""
    found = [row for row in read("bench_libra") if row["table"] in ("accuracy", "other tasks")]
    cells = by(found, "trace", "fitted", last="predictor")
    columns: Columns = {
        "tokens": "{linear[trace]}",
        "fitted on": "{linear[fitted]}",
        "`Linear`": "{linear[accuracy]:.3f}",
        "`PathTable`": "{path[accuracy]:.3f}",
    }
    return table(columns, list(cells.values()))


@shown
def published() -> Table:
    """docs/published.md: what others published beside what is predicted."""
    return table(PUBLISHED, read("bench_published"))


@shown
def node_dispatch() -> Table:
    """Rows between nodes per token and layer, of a dispatch by ranks and of one by nodes."""
    columns: Columns = {
        "stream": "{trace}",
        "placer": "`{placer}`",
        "policy": "`{policy}`",
        "by ranks": "{node_rows:.3f}",
        "by nodes": "{node_dispatch_rows:.3f}",
        "fewer": lambda row: f"{100 * (1 - row['node_dispatch_rows'] / row['node_rows']):.0f} %",
    }
    return table(
        columns, [r for r in read("bench_route", "even", "deal") if r["policy"] in ("none", "grace", "exact")]
    )


@shown
def loads() -> Table:
    """docs/own-counts.md: the busiest rank by what a rank may know in the forward."""
    protocols = ("hash", "static", "last step, sampled", "own", "own + targets", "node")
    found: dict[tuple[int, str, str], list[float]] = {}
    for row in read("bench_loads", "all", "busy"):
        found.setdefault((row["tokens"], row["protocol"], row["dealing"]), []).append(row["mean"])
    rows = []
    for tokens in sorted({key[0] for key in found}):
        means = ([found[tokens, p, dealing] for dealing in ("hom", "het")] for p in protocols)
        rows.append([str(tokens), *(" / ".join(f"{sum(x) / len(x):.3f}" for x in of) for of in means)])
    return f"tokens of a rank | {' | '.join(protocols)}", rows


def _mean(settings: dict[tuple[str, str, int, int], dict[str, float]], protocol: str, dealing: str) -> float:
    values = [x[protocol] for at, x in settings.items() if at[1] == dealing and protocol in x]
    return sum(values) / len(values)


@shown
def loads_idle() -> Table:
    """docs/own-counts.md: the same with idle ranks, by own counts, and the most that targets lose in a setting."""
    protocols = ("own", "own + targets", "node, no targets", "node")
    rows = []
    for busy in ("half", "turns", "bursts", "one", "leave"):
        settings: dict[tuple[str, str, int, int], dict[str, float]] = {}
        for row in read("bench_loads", busy, "busy"):
            at = row["trace"], row["dealing"], row["ranks"], row["tokens"]
            settings.setdefault(at, {})[row["protocol"]] = row["mean"]
        cells = [" / ".join(f"{_mean(settings, p, d):.3f}" for d in ("hom", "het")) for p in protocols]
        for alone, targets in (protocols[:2], protocols[2:]):
            cells.append(f"{max(x[targets] - x[alone] for x in settings.values() if targets in x):+.4f}")
        rows.append([busy, *cells])
    return f"busy | {' | '.join(protocols)} | most lost, own | most lost, node", rows


@shown
def known_routes() -> Table:
    """Imbalance of a step by the order of its sequences, for placements and policies."""
    keys = ("ranks", "placement", "spare_slots", "policy")
    cells = by(read("bench_known_routes"), *keys, last="order")
    columns: Columns = {
        "ranks": "{chosen[ranks]}",
        "placement": "{chosen[placement]}",
        "policy": "`{chosen[policy]}`",
        "spare slots": "{chosen[spare_slots]}",
        "as they come": "{as they come[imbalance]:.3f}",
        "shuffled": "{shuffled[imbalance]:.3f}",
        "chosen": "{chosen[imbalance]:.3f}",
        "borrowed": "{chosen[borrowed]:.1f}",
        "rows to other ranks": "{chosen[rows]:.2f}",
    }
    return table(columns, list(cells.values()))


@shown
def hooks() -> Table:
    """docs/support.md: the versions of each engine to which each hook attaches, and the reasons."""
    rows = []
    for engine in ENGINE_SEAMS:
        for hook, ranges in version_ranges(engine).items():
            missing = [f"{versions}: {reason}" for reason, versions in ranges.items() if reason]
            rows.append([engine, f"`{hook}`", ranges[""] or "none", "; ".join(missing)])
    return "engine | hook | attaches to | does not attach to", rows
