"""The tables of README.md and docs/*.md, each built from files under bench/results; bench/tables.py writes them.

Which rows a page shows is fixed here, so that a page and its results cannot drift apart. Where rows of a results file
are rows of the page, a table is its columns; benches print by the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lib.table import Columns, Table, same, table

RESULTS = Path(__file__).parents[1] / "results"
Row = dict[str, Any]
TABLES: dict[str, Callable[[], Table]] = {}


def read(name: str, kind: str = "", column: str = "table") -> list[Row]:
    """A results file, or what of it is of one kind."""
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [row for row in rows if not kind or row.get(column) == kind]


def shown(build: Callable[[], Table]) -> Callable[[], Table]:
    TABLES[build.__name__] = build
    return build


def by(rows: Iterable[Row], *keys: str, last: str = "policy") -> dict[tuple[Any, ...], dict[Any, Row]]:
    """{values of keys: {policy: row}}"""
    cells: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in keys), {})[row[last]] = row
    return cells


# --- Tables whose rows are those of a file.

RANKS = "{ranks}+{replicas}"
AFFINE = "{affine_us:.0f} ({affine_ratio:.0f}x), {affine_gap_mean:.1f} %"
PLANNING: Columns = {
    "R + replicas": RANKS,
    "exact, per layer of 58": "{plan_us[batch]:.2f}",
    "p99 of single layers": "{plan_us[single_p99]:.1f}",
    "public call": "{public_us[median]:.1f}",
    "HiGHS": "{highs_us:.0f} ({highs_ratio:.0f}x)",
    "affine scaling x5, its gap": AFFINE,
    "share row": "{share_row_us:.1f}",
    "count+share+route": "{count_share_route_us:.0f}",
}
SHARED_PLANNING: Columns = {
    "ranks+replicas": RANKS,
    "exact": "{exact_us:.2f}",
    "exact, stops at the level": "{exact_pour_us:.2f}",
    "share by rank": "{share_by_rank_us:.2f}",
    "waterfill": "{waterfill_us:.2f}",
    "joint": "{joint_us:.1f}",
    "public exact / waterfill / joint": "{public_us[exact]:.0f} / {public_us[waterfill]:.0f} / {public_us[joint]:.0f}",
    "route_shared": "{route_shared_us:.0f}",
    "sampled static": "{static_us:.0f}",
    "sampled dynamic": "{dynamic_us:.0f}",
}
TOLERANCES: Columns = {
    "R + replicas": RANKS,
    "exact": "{exact_us:.2f}",
    "with tolerance 0.001": "{tolerance_us:.2f}",
    "ratio": "{ratio:.2f}",
    "paths, spared": "{paths:.1f}, {paths_spared:.1f}",
    "copies that these move": "{copies_spared:.0f}",
    "peak above the bound": "{above_bound:.3f*100} %",
}
SPEEDS: Columns = {
    "speeds": "{speeds}",
    "R + replicas": RANKS,
    "placer": "`{placer}`",
    **{f"{name} known": f"{{{name}:.3f}}" for name in ("nothing", "plan", "placement", "both")},
}
LP: Columns = {
    "R + replicas": RANKS,
    "exact": "{plan_us[exact][batch]:.1f}",
    "lp, float32": "{plan_us[lp32][batch]:.1f}",
    "lp, float64": "{plan_us[lp64][batch]:.1f}",
    "lp / exact": lambda row: f"{row['plan_us']['lp32']['batch'] / row['plan_us']['exact']['batch']:.1f}x",
    "HiGHS": "{highs_us:.0f}",
    "affine scaling x5": "{affine_us:.0f}",
    "iterations": "{reached[lp32][iterations][mean]:.1f}",
    "largest gap, %": "{reached[lp32][gap][max]:.4f}",
}
HELD = {"own": "their own", "same": "all the same"}
SGLANG_NAMES = {
    ("own", "static"): "SGLang `static`",
    ("own", "dynamic"): "SGLang `dynamic`: a random replica",
    ("own", "isoload"): "isoload behind `lp`",
    ("same", "dynamic"): "SGLang `dynamic`: replicas by row",
    ("same", "isoload"): "isoload behind `dynamic`",
}
SGLANG: Columns = {
    "tokens": "{tokens}",
    "ranks hold": lambda row: HELD[row["held"]],
    "dispatch": lambda row: SGLANG_NAMES[row["held"], row["policy"]],
    "imbalance, mean": "{imbalance_mean:.3f}",
    "worst layer and batch": "{imbalance_max:.3f}",
    "us per call": "{us:.0f}",
}
VLLM_NAMES = {
    "vllm": "vLLM, a hash of the row",
    "isoload": "isoload, all counts",
    "isoload_own": "isoload, own counts",
}
VLLM: Columns = {
    "tokens": "{tokens}",
    "ranks hold": lambda row: HELD[row["held"]],
    "replicas chosen by": lambda row: VLLM_NAMES[row["policy"]],
    "imbalance, mean": "{imbalance_mean:.3f}",
    "worst layer and batch": "{imbalance_max:.3f}",
}
ROUTE_NAMES = {
    "grace_sampled:locality=False": "weighted random",
    "grace_sampled": "locality first, drawn",
    "grace": "`grace`",
    "exact:objective=local:tolerance=0.0": "`exact`, local",
    **{
        f"exact:objective=local:tolerance=0.{n}": f"`exact`, local, {p} %"
        for n, p in (("05", 5), (1, 10), (2, 20))
    },
}
ROUTE: Columns = {
    "stream": "{trace}",
    "placer, replicas": "`{placer}`, {replicas:.1f}",
    "policy": lambda row: ROUTE_NAMES.get(row["policy"], row["policy"]),
    "rows that leave the rank": "{rank_rows:.3f}",
    "the node": "{node_rows:.3f}",
    "the node, once each": "{node_dispatch_rows:.3f}",
    "saved, %": "{saved:.0f*100}",
    **same(("imbalance", "deviation", "idle"), "{NAME:.3f}"),
}
TRAFFIC_RULES = ("static", "dynamic", "blog", "counts", "ours", "best")
SHARED_TRAFFIC: Columns = {
    "R+replicas": RANKS,
    "K": "top-{top_k}",
    "tokens per rank": "{tokens}",
    "drift": "{drift}",
    **same(TRAFFIC_RULES, "{unvisited[NAME]:.2f*100} ({peak[NAME]:.3f})"),
    "static / ours": lambda row: "none sent" if row["fewer"] is None else f"{row['fewer']:.0f}x",
}
ROWS: dict[str, tuple[Columns, Callable[[], list[Row]]]] = {
    "planning": (PLANNING, lambda: [row for row in read("bench_plan") if "table" not in row]),
    "sglang": (SGLANG, lambda: read("bench_sglang")),
    "vllm": (VLLM, lambda: read("bench_vllm")),
}

# --- Tables across rows.


@shown
def replay() -> Table:
    """README: `make run`'s replay, by policy."""
    names = {
        "in order, no replicas": "in order, no replicas: 4 slots per rank",
        "static": "`static`: SGLang's default, one replica per source rank",
        "dynamic": "`dynamic`: SGLang's random replica",
        "exact": "`exact`",
    }
    found = json.loads((RESULTS / "replay_gptoss20b.json").read_text())["policies"]
    columns: Columns = {
        "policy": lambda row: names[row["policy"]],
        "imbalance, mean": "{imbalance[mean]:.3f}",
        "worst layer and batch": "{imbalance[max]:.3f}",
        "busiest rank over the proved bound": lambda row: (
            f"{100 * row['gap']['mean']:.1f} %" if row["gap"]["max"] else "0 %, certified"
        ),
    }
    return table(columns, [row for row in found if row["policy"] in names])


BALANCE = [
    *(("DeepSeek-V3", placement, 4096) for placement in ("no EPLB", "red0", "red32")),
    *((trace, "red32", 4096) for trace in ("GLM-5.2", "gpt-oss-20b")),
    *((trace, "red32", 64) for trace in ("DeepSeek-V3", "GLM-5.2")),
    ("gpt-oss-20b", "red16", 64),
]


@shown
def balance() -> Table:
    """Shared experts on real routing: change of the busiest rank and of the rows that travel."""
    cells = by(read("bench_balance"), "trace", "placement", "tokens")
    drawn = {f"sampled {rule}": f"waterfill_sampled:rule={rule}" for rule in ("static", "dynamic")}
    policies = {**drawn, **{name: name for name in ("waterfill", "exact", "joint")}}
    columns = {
        name: lambda cell, p=policy: f"{100 * cell[p]['busiest']:+.1f}" for name, policy in policies.items()
    }
    travel = (*drawn.values(), "waterfill", "joint")
    columns["rows"] = lambda cell: " / ".join(f"{cell[p]['rows'] / 0.01:+.1f}" for p in travel)
    where = same(("trace", "placement", "tokens"), "{shared_local[NAME]}")
    columns = {**where, "own rank": "{shared_local[imbalance_mean]:.3f}", **columns}
    return table(columns, [cells[key] for key in BALANCE])


SAMPLING = {  # (ranks, replicas): tokens
    "DeepSeek-V3": {(16, 32): [64, 1024, 65536], (128, 128): [1024]},
    "GLM-5.2": {(16, 32): [64], (128, 128): [1024]},
    "gpt-oss-20b": {(16, 16): [64, 1024]},
}


@shown
def sampling() -> Table:
    """What drawing replicas costs against quotas: busiest rank over exact's bound, %."""
    cells = by(read("bench_replicas"), "trace", "ranks", "replicas", "tokens")
    columns: Columns = {
        "model": "{exact[trace]}",
        "R + replicas": "{exact[ranks]}+{exact[replicas]}",
        "tokens": "{exact[tokens]}",
        "exact": "{exact[imbalance_mean]:.3f}",
        **same(
            ("lp", "lp_sampled", "even", "dynamic", "affine5", "affine5_sampled"), "{NAME[gap_mean]:.2f*100}"
        ),
    }
    keys = [
        (m, *size, n) for m, sizes in SAMPLING.items() for size, batches in sizes.items() for n in batches
    ]
    return table(columns, [cells[key] for key in keys])


BORROW = [
    (shape, *cell)
    for shape in ("gpt-oss-120b", "DeepSeek-V3", "Kimi-K2")
    for cell in (
        (0.95, 1, "repeated"),
        (0.95, 1, "distinct"),
        (0.3, 4, "distinct"),
        (0.95, 4, "distinct"),
        (0.95, 16, "distinct"),
    )
]


@shown
def borrow() -> Table:
    """docs/results-cpu.md: plain expert parallelism and `llep`, on the protocol of LLEP's paper."""
    cells = by(read("bench_llep", "layer", "kind"), "shape", "share", "num_hot", "form")
    columns: Columns = {
        "layer": "{EP[shape]}",
        "tokens into experts": "{EP[share]:.0f*100} % into {EP[num_hot]}",
        "form": "{EP[form]}",
        "copies, EP / LLEP": "{EP[copies_ratio]:.2f} / {LLEP[copies_ratio]:.3f}",
        "time, EP / LLEP": "{EP[ratio]:.2f} / {LLEP[ratio]:.2f}",
        "LLEP's GEMMs": "{LLEP[gemms_ratio]:.2f}",
        "experts moved, MB": "{LLEP[moved]}, {LLEP[weight_bytes]:.1f/1e6}",
        "rows, EP / LLEP": "{EP[rows_left]:.0f} / {LLEP[rows_left]:.0f}",
        "peak MB, EP / LLEP": "{EP[peak_bytes]:.0f/1e6} / {LLEP[peak_bytes]:.0f/1e6}",
    }
    return table(columns, [cells[key] for key in BORROW])


@shown
def advise() -> Table:
    """What was chosen by some batches, and the verdict about isoload, by phase."""
    how = "{NAME[chosen]}: {NAME[verdict]}"
    columns: Columns = {
        "trace": "{prefill[trace]}",
        "ranks": "{prefill[ranks]}",
        **{
            f"{phase}, {tokens} tokens of a rank": how.replace("NAME", phase)
            for phase, tokens in (("prefill", "4,096"), ("decode", 128))
        },
    }
    return table(columns, by(read("bench_advise"), "trace", "ranks", last="phase").values())


@shown
def times() -> Table:
    """Errors of the shipped constants on rows that they were not fitted to, beside two guesses without any."""
    named = {
        "prefill": "SGLang over DeepEP, prefill",
        "decode": "SGLang over DeepEP, decode",
        "moe_perf": "all kernels, from 1,024 tokens on",
        "fused": "a whole fused layer, 4 to 32 GPUs",
    }
    rows = {row["held_out"]: row for row in read("fit_times") if row.get("held_out") in named}
    cells = [
        [
            name,
            f"{rows[key]['rows']:,}",
            *(f"{100 * rows[key][part]:.1f} %" for part in ("median", "p90", "flat", "scaled")),
        ]
        for key, name in named.items()
    ]
    return (
        "skewed rows of | rows | median error | p90 | if skew cost nothing | if time were x max/mean",
        cells,
    )


TABLES |= {name: lambda of=columns, rows=rows: table(of, rows()) for name, (columns, rows) in ROWS.items()}
