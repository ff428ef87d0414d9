"""The tables of README.md and docs/*.md, each built from files under bench/results; bench/tables.py writes them.

A table is its head and its rows, as printed. Which rows a page shows is fixed here, so that a page and its results
cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ahead_tables import AHEAD_TABLES
from place_tables import PLACE_TABLES

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Table = tuple[str, list[list[str]]]  # "first column | second column", the rows' cells


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """{values of keys: {policy: row}}"""
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in keys), {})[row["policy"]] = row
    return cells


def digits(unit: float, how: str, *values: float) -> str:
    return " / ".join(f"{value / unit:{how}}" for value in values)


def replay() -> Table:
    """README: `make run`'s replay, by policy."""
    names = {
        "none": "`none`: no replicas used",
        "static": "`static`: SGLang's default, one replica per source rank",
        "dynamic": "`dynamic`: SGLang's random replica",
        "exact": "`exact`",
    }
    found = {
        row["policy"]: row for row in json.loads((RESULTS / "replay_gptoss20b.json").read_text())["policies"]
    }
    rows = []
    for policy, name in names.items():
        imbalance, gap = found[policy]["imbalance"], found[policy]["gap"]
        over = f"{100 * gap['mean']:.1f} %" if gap["max"] else "0 %, certified"
        rows.append([name, f"{imbalance['mean']:.3f}", f"{imbalance['max']:.3f}", over])
    return "policy | imbalance, mean | worst layer and batch | busiest rank over the proved bound", rows


BALANCE = [
    *(
        (trace, placement, 4096)
        for trace in ("DeepSeek-V3", "GLM-5.2", "gpt-oss-20b")
        for placement in ("no EPLB", "red0", "red16", "red32")
    ),
    *(("DeepSeek-V3", "red32", tokens) for tokens in (64, 1024, 65536)),
    ("GLM-5.2", "red32", 64),
    ("gpt-oss-20b", "red16", 64),
    ("gpt-oss-20b", "red32", 64),
    ("gpt-oss-20b, shipped cut", "red32", 256),
]


def balance() -> Table:
    """Shared experts on real routing: change of the busiest rank and of the rows that travel."""
    cells, rows = by(read("bench_balance"), "trace", "placement", "tokens"), []
    sampled = [f"waterfill_sampled:rule={rule}" for rule in ("static", "dynamic")]
    for key in BALANCE:
        cell = cells[key]
        busiest = [f"{100 * cell[p]['busiest']:+.1f}" for p in (*sampled, "waterfill", "exact", "joint")]
        travel = digits(0.01, "+.1f", *(cell[p]["rows"] for p in (*sampled, "waterfill", "joint")))
        home = f"{cell['shared_local']['imbalance_mean']:.3f}"
        rows.append([*key[:2], str(key[2]), home, *busiest, travel])
    head = "trace | placement | tokens | at home | sampled static | sampled dynamic | waterfill | exact | joint | rows"
    return head, rows


def shared_traffic() -> Table:
    rows = []
    for row in read("bench_shared_traffic"):
        rules = ("static", "dynamic", "blog", "counts", "ours", "best")
        cells = [f"{100 * row['unvisited'][rule]:.2f} ({row['peak'][rule]:.3f})" for rule in rules]
        fewer = "none sent" if row["fewer"] is None else f"{row['fewer']:.0f}x"
        setting = [f"{row['ranks']}+{row['replicas']}", f"top-{row['top_k']}", str(row["tokens"])]
        rows.append([*setting, str(row["drift"]), *cells, fewer])
    head = "R+replicas | K | tokens per rank | drift | static | dynamic | blog | counts | ours | best | static / ours"
    return head, rows


SAMPLING = {  # (ranks, replicas): tokens
    "DeepSeek-V3": {(8, 32): [1024], (16, 32): [64, 1024, 65536], (32, 64): [64, 1024, 65536]},
    "GLM-5.2": {(8, 32): [1024], (16, 32): [64, 1024, 65536], (32, 64): [64, 1024, 65536]},
    "gpt-oss-20b": {(8, 8): [1024], (16, 16): [64, 1024, 65536]},
}
for _large in ("DeepSeek-V3", "GLM-5.2"):
    SAMPLING[_large] |= {(64, 64): [1024], (128, 128): [1024]}


def sampling() -> Table:
    """What drawing replicas costs against quotas: busiest rank over exact's bound, %."""
    cells, rows = by(read("bench_replicas"), "trace", "ranks", "replicas", "tokens"), []
    drawn = ("lp", "lp_sampled", "even", "dynamic", "affine5", "affine5_sampled")
    for trace, settings in SAMPLING.items():
        for (ranks, replicas), batches in settings.items():
            for tokens in batches:
                cell = cells[trace, ranks, replicas, tokens]
                gaps = [f"{100 * cell[policy]['gap_mean']:.2f}" for policy in drawn]
                exact = f"{cell['exact']['imbalance_mean']:.3f}"
                rows.append([trace, f"{ranks}+{replicas}", str(tokens), exact, *gaps])
    return f"model | R + replicas | tokens | exact | {' | '.join(drawn)}", rows


def active_slots() -> Table:
    """Fewest slots against fewest copies, by the tokens of a batch."""
    files = {
        "gpt-oss-20b": ("gptoss20b_decode", [8, 64, 1024, 4096]),
        "DeepSeek-V3": ("dsv3_sglang_longin", [32, 128, 1024, 8192]),
    }
    rows = []
    for model, (trace, batches) in files.items():
        found = read(f"bench_active_{trace}")
        for tokens in batches:
            cell = {row["split"]: row for row in found if row["tokens"] == tokens}
            splits = (cell[split] for split in ("even", "exact", "active"))
            name = f"{model}, R={cell['exact']['ranks']}, S={cell['exact']['slots_per_rank']}"
            cells = [f"{row['slots']:.1f}, {row['copies']:.0f}, {row['us']:.0f}" for row in splits]
            rows.append([name, str(tokens), *cells])
    splits = (f"{split}: slots, copies, us" for split in ("even", "exact", "exact_active"))
    return f"trace | tokens | {' | '.join(splits)}", rows


def planning() -> Table:
    """Times of one layer's plan, and of rivals on the same instances."""
    rows = []
    for row in read("bench_plan"):
        rows.append(
            [
                f"{row['ranks']}+{row['replicas']}",
                f"{row['plan_us']['batch']:.2f}",
                f"{row['plan_us']['single_p99']:.1f}",
                f"{row['public_us']['median']:.1f}",
                f"{row['highs_us']:.0f} ({row['highs_ratio']:.0f}x)",
                f"{row['affine_us']:.0f} ({row['affine_ratio']:.0f}x), {row['affine_gap_mean']:.1f} %",
                f"{row['share_row_us']:.1f}",
                f"{row['count_share_route_us']:.0f}",
            ]
        )
    head = "R + replicas | exact, per layer of 58 | p99 of single layers | public call | HiGHS | "
    return f"{head}affine scaling x5, its gap | share row | count+share+route", rows


def shared_planning() -> Table:
    rows = []
    for row in read("bench_shared"):
        ops = ("exact_us", "exact_pour_us", "share_by_rank_us", "waterfill_us")
        public = digits(1, ".0f", *(row["public_us"][policy] for policy in ("exact", "waterfill", "joint")))
        tokens = [f"{row[key]:.0f}" for key in ("route_shared_us", "static_us", "dynamic_us")]
        cells = [*(f"{row[key]:.2f}" for key in ops), f"{row['joint_us']:.1f}", public, *tokens]
        rows.append([f"{row['ranks']}+{row['replicas']}", *cells])
    head = "ranks+replicas | exact | exact, stops at the level | share by rank | waterfill | joint | "
    public = "public exact / waterfill / joint"
    return f"{head}{public} | route_shared | sampled static | sampled dynamic", rows


def lp() -> Table:
    rows = []
    for row in read("bench_lp"):
        times = {name: row["plan_us"][name]["batch"] for name in ("exact", "lp32", "lp64")}
        rows.append(
            [
                f"{row['ranks']}+{row['replicas']}",
                *(f"{time:.1f}" for time in times.values()),
                f"{times['lp32'] / times['exact']:.1f}x",
                f"{row['highs_us']:.0f}",
                f"{row['affine_us']:.0f}",
                f"{row['reached']['lp32']['iterations']['mean']:.1f}",
                f"{row['reached']['lp32']['gap']['max']:.4f}",
            ]
        )
    head = "R + replicas | exact | lp, float32 | lp, float64 | lp / exact | HiGHS | affine scaling x5 | "
    return f"{head}iterations | largest gap, %", rows


def spill() -> Table:
    times = {(row["time"], row["ranks"]): row for row in read("bench_spill") if "time" in row}
    rows = []
    for policy in ("llep", "spill_cost"):
        for ranks in (8, 64):
            row = times[policy, ranks]
            rows.append(
                [policy, str(ranks), f"{row['median_us']:.0f}", f"{row['slowest_us']:.0f}", row["slowest"]]
            )
    return "policy | ranks | median | slowest | the slowest instance: tokens into experts", rows


def layer() -> Table:
    """One layer over 8 virtual ranks on recorded routing: what replicas save and cost."""
    rows = []
    for row in read("bench_layer"):
        if row["kind"] == "virtual" and row["routing"].startswith("gptoss"):
            sizes = ("forward_bytes", "backward_bytes", "refresh_bytes")
            rows.append(
                [
                    row["policy"],
                    f"{row['busiest_copies']:.0f}",
                    f"{row['experts_busiest_ms']:.2f}",
                    f"{row['rows_sent']:.0f}",
                    *(f"{row[key] / 1e6:.1f}" for key in sizes),
                    digits(1e6, ".0f", row["forward_peak_bytes"], row["training_peak_bytes"]),
                ]
            )
    head = "policy | busiest rank: copies | its experts, ms | rows sent | forward, MB | backward, MB | "
    return f"{head}refresh, MB | peak forward / training, MB", rows


BORROW = [
    (shape, share, num_hot, form)
    for shape in ("gpt-oss-120b", "DeepSeek-V3", "Kimi-K2")
    for share, num_hot, form in (
        (0.95, 1, "repeated"),
        (0.95, 1, "distinct"),
        (0.3, 4, "distinct"),
        (0.95, 4, "distinct"),
        (0.95, 16, "distinct"),
    )
]


def borrow() -> Table:
    """docs/borrowing.md: plain expert parallelism and `llep`, on the protocol of LLEP's paper."""
    layers = [row for row in read("bench_llep") if row["kind"] == "layer"]
    cells, rows = by(layers, "shape", "share", "num_hot", "form"), []
    for shape, share, num_hot, form in BORROW:
        ep, llep = (cells[shape, share, num_hot, form][policy] for policy in ("EP", "LLEP"))
        rows.append(
            [
                shape,
                f"{100 * share:.0f} % into {num_hot}",
                form,
                f"{ep['copies_ratio']:.2f} / {llep['copies_ratio']:.3f}",
                digits(1, ".2f", ep["ratio"], llep["ratio"]),
                f"{llep['gemms_ratio']:.2f}",
                f"{llep['moved']}, {llep['weight_bytes'] / 1e6:.1f}",
                digits(1, ".0f", ep["rows_left"], llep["rows_left"]),
                digits(1e6, ".0f", ep["peak_bytes"], llep["peak_bytes"]),
            ]
        )
    head = "layer | tokens into experts | form | copies, EP / LLEP | time, EP / LLEP | LLEP's GEMMs | "
    return f"{head}experts moved, MB | rows, EP / LLEP | peak MB, EP / LLEP", rows


def sglang() -> Table:
    """SGLang's own dispatch beside isoload's."""
    names = {
        ("own", "static"): "SGLang `static`",
        ("own", "dynamic"): "SGLang `dynamic`: a random replica",
        ("own", "isoload"): "isoload behind `lp`",
        ("same", "dynamic"): "SGLang `dynamic`: replicas by row",
        ("same", "isoload"): "isoload behind `dynamic`",
    }
    rows = []
    for row in read("bench_sglang"):
        held = {"own": "their own", "same": "all the same"}[row["held"]]
        figures = [f"{row['imbalance_mean']:.3f}", f"{row['imbalance_max']:.3f}", f"{row['us']:.0f}"]
        rows.append([str(row["tokens"]), held, names[row["held"], row["policy"]], *figures])
    return "tokens | ranks hold | dispatch | imbalance, mean | worst layer and batch | us per call", rows


def vllm() -> Table:
    """vLLM's choice of replicas beside isoload's."""
    names = {
        "vllm": "vLLM, a hash of the row",
        "isoload": "isoload, all counts",
        "isoload_own": "isoload, own counts",
    }
    rows = []
    for row in read("bench_vllm"):
        held = {"own": "their own", "same": "all the same"}[row["held"]]
        figures = [f"{row['imbalance_mean']:.3f}", f"{row['imbalance_max']:.3f}"]
        rows.append([str(row["tokens"]), held, names[row["policy"]], *figures])
    return "tokens | ranks hold | replicas chosen by | imbalance, mean | worst layer and batch", rows


TABLES: dict[str, Callable[[], Table]] = {
    table.__name__: table
    for table in (
        replay,
        balance,
        shared_traffic,
        sampling,
        active_slots,
        planning,
        shared_planning,
        lp,
        spill,
        layer,
        borrow,
        sglang,
        vllm,
        *PLACE_TABLES.values(),
        *AHEAD_TABLES.values(),
    )
}
