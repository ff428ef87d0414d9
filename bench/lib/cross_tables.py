"""Tables of docs/results-*.md and others in which a row joins many rows of a results file."""

from __future__ import annotations

from typing import Any

from isoload.engines.seams import ENGINE_SEAMS, version_ranges
from lib.result_tables import Row, by, read, shown
from lib.table import Columns, Table, table


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
    sizes = (("DeepSeek-V3", 32, 2), ("DeepSeek-V3", 32, 4), ("DeepSeek-V3", 64, 8), ("DeepSeek-V3", 64, 14))
    return table(columns, [cells[key] for key in (*sizes, ("GLM-5.2", 32, 1), ("GLM-5.2", 32, 4))])


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
    rules = ("always", "gain_ms=0")
    both = {
        "rebalances": "{NAME[moves]}",
        "slots changed": "{NAME[changed]:.1f*100} %",
        "saved, s": "{NAME[gain_s]:.1f}",
        "moves take, s": "{NAME[cost_s]:.1f}",
    }
    columns: Columns = {
        "traffic": "{always[traffic]}",
        "placer": "`{always[placer]}`",
        **{head: " / ".join(how.replace("NAME", rule) for rule in rules) for head, how in both.items()},
    }
    rows = [row for row in read("bench_rebalance") if "rule" in row]
    return table(columns, by(rows, "traffic", "placer", last="rule").values())


NEAR_TRACES = {
    "dsv2lite_esft_law": "DeepSeek-V2-Lite, law",
    "dsv2lite_esft_intent": "DeepSeek-V2-Lite, intent",
    "dsv2lite_esft_summary": "DeepSeek-V2-Lite, summary",
    "gptoss20b_decode_mmlu": "gpt-oss-20b",
    "olmoe_mmlu_small": "OLMoE",
}


@shown
def place_near() -> Table:
    """`scenario` without and with `near`: rows between nodes, and imbalance of tokens that were not placed on."""

    def place(cell: Row) -> str:
        trace, *part = cell["near"]["placed_on"].split(", ")
        return NEAR_TRACES[trace] + (f", {part[0]} tokens" if "300" in str(part) else "")

    columns: Columns = {
        "placed on": place,
        "judged on": lambda cell: NEAR_TRACES.get(cell["near"]["judged_on"], cell["near"]["judged_on"]).split(
            ", "
        )[-1],
        "nodes x ranks, slots": lambda cell: (
            f"{cell['near']['nodes']} x {cell['near']['ranks'] // cell['near']['nodes']}, {cell['near']['slots']}"
        ),
        "rows to other nodes": lambda cell: (
            f"{cell['scenario']['rows']:.3f} / {cell['near']['rows']:.3f}"
            f" ({100 * cell['near']['rows_ratio'] - 100:+.0f} %)"
        ),
        "peak, exact": lambda cell: (
            f"{cell['scenario']['peak']:.3f} / {cell['near']['peak']:.3f}"
            + (" LOSS" if cell["near"].get("met") is False else "")
        ),
        "even": "{scenario[even]:.3f} / {near[even]:.3f}",
    }
    rows = [
        row for row in read("bench_near", "unseen") if (row["nodes"], row["slots"]) not in ((2, 6), (4, 12))
    ]
    cells = by(rows, "placed_on", "judged_on", "nodes", "ranks", "slots", last="placer")
    return table(columns, cells.values())


STREAMS = (
    ("DeepSeek-V2-Lite", 8, "even"),
    ("DeepSeek-V2-Lite", 8, "sequence"),
    ("gpt-oss-20b", 8, "even"),
    ("GLM-5.2", 8, "even"),
    ("GLM-5.2", 32, "even"),
)
FORECASTS = ("0.45", "0.45 partner", "last")
FILLS = {
    "`hedge` 2": ("hedge", 2),
    "`hedge` 4": ("hedge", 4),
    "`hedge` 2, local kept": ("hedge held", 2),
    "`libra_published` 8": ("libra_published", 8),
    "`libra` 8": ("libra", 8),
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
    for stream in STREAMS[1:]:
        for forecast in FORECASTS + ("popularity",) * stream[0].startswith("GLM"):
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
def published() -> Table:
    """docs/published.md: what others published beside what is predicted."""
    return table(PUBLISHED, read("bench_published"))


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
    return table(columns, [row for row in cells.values() if row["chosen"]["spare_slots"] < 2])


@shown
def hooks() -> Table:
    """docs/support.md: the versions of each engine to which each hook attaches, and the reasons."""
    rows = []
    for engine in ENGINE_SEAMS:
        for hook, ranges in version_ranges(engine).items():
            missing = [f"{versions}: {reason}" for reason, versions in ranges.items() if reason]
            rows.append([engine, f"`{hook}`", ranges[""] or "none", "; ".join(missing)])
    return "engine | hook | attaches to | does not attach to", rows
