"""Fits the constants of isoload.times to public measurements and checks them against rows that no fit has seen.

Source: the tables in the wheel aiconfigurator-core 0.12.0 (Apache-2.0): `pip install 'isoload[times]'`. One GPU played
the busiest rank of a group, over sizes of the batch and of the group, with even loads and loads from power laws.

What is fitted: five constants of each kernel (isoload.times.experts.kernel_us) to the even rows alone; three of each
exchange. What is held out: every skewed row. Their loads are made again (bench/lib/times_loads.py); means over draws.

- prefill, decode: SGLang's DeepEP layers of DeepSeek-V3. Even prefill rows are not padded to tiles of 128 as others
  are, so those count where they are multiples. In decode, batches with no more copies than experts are left out: ties
  in the collector's rounding decide what they hold.
- moe_perf: kernels of SGLang, vLLM and TensorRT-LLM; judged from 1,024 tokens on, over 2 or more ranks.
- fused: one kernel for a whole layer, timed on real groups of 4 to 32 GPUs; the slowest rank, in prefill. Its seed
  was found by trying: the times of its rows chose it. Rows of `power_law_sampled` are left out, their draw is unknown.

Not shipped, decided from even rows: fewer than 20 over several ranks; mean error of the fit beyond 12 %; balanced rows
that are slower than the skewed ones beside them (grouped routing sends even choices to few experts). Not shipped, but
counted in the table: a kernel whose own held-out median is beyond 15 %.

Usage: python bench/fit_times.py            # writes python/isoload/times/*.json and bench/results/fit_times.jsonl
       python bench/fit_times.py --check    # writes nothing; exits with 1 where a bound of the table does not hold
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isoload.analysis.measuring import fit_curve
from isoload.times import AllToAllTime, ExpertTime, available
from isoload.times.exchanges import STEPS, Curve
from lib import times_tables as tables
from lib.harness import begin, command, write_results
from lib.table import Columns, show
from lib.times_kernels import CONSTANTS, WORST_FIT, Kernel, kernels, short, timed
from lib.times_tables import Row

SHIPPED = Path(__file__).parents[1] / "python" / "isoload" / "times"
BOUNDS = {"prefill": (0.07, 0.17), "decode": (0.06, 0.14), "moe_perf": (0.075, 0.22), "fused": (0.07, 0.12)}
RATIO, DIFFER = (
    0.02,
    0.03,
)  # of two distributions' times: median error, and from where on the sign must be right
SAME = 0.01  # what is shipped and what is fitted now may differ by rounding and by SciPy's version
WHAT = ("gpu", "kernel", "dtype", "hidden", "intermediate", "experts")
TOLD = ("kind", "tile", "copies_from", "copies_to", "fit_error", "held_out_error")
EXPERTS = (*WHAT, "top_k", "model", "version", *CONSTANTS, *TOLD[1:], "example")
JOINED = ("gpu", "kernel", "hidden", "top_k", "ranks", "nodes")
EXCHANGES = (*JOINED, "experts", "version", *STEPS, "tokens_to", "fit_error")
HELD_OUT: Columns = {
    "rows of": "{held_out}",
    "kernels": "{kernels}",
    "rows": "{rows}",
    "beyond": "{beyond}",
    "median, %": "{median:.1f*100}",
    "p90, %": "{p90:.1f*100}",
    "if imbalance cost nothing": "{flat:.0f*100}",
    "x max/mean": "{scaled:.0f*100}",
    "wrong signs": "{wrong_signs}",
    "bounds": lambda row: ", ".join(f"{100 * bound:g}" for bound in row["bounds"]),
    "met": "{met}",
}


def exchanges(data: Path) -> Iterator[Row]:
    """All-to-alls of known models, with curves of both steps."""
    for group in tables.exchange_groups(data):
        tokens = np.array([row["tokens"] for row in group.rows], np.float64)
        found, worst = dict(group.is_), 0.0
        if len(tokens) < 6:
            yield found | {"left_out": f"{len(tokens)} rows"}
            continue
        for step in STEPS:
            constants, errors = fit_curve(tokens, np.array([row[step] for row in group.rows]))
            found[step] = [short(value) for value in constants]
            worst = max(worst, float(np.abs(errors).mean()))
        found |= {"tokens_to": int(tokens.max()), "fit_error": short(worst)}
        yield found | ({"left_out": f"mean error of the fit: {worst:.2f}"} if worst > WORST_FIT else {})


def held_out(kind: str, of_kind: list[Kernel]) -> Row:
    """The table's row of a kind of kernels: medians of relative errors over all their held-out rows."""
    judged = [kernel for kernel in of_kind if kernel.held_out]
    errors = np.abs([each for kernel in judged for each in kernel.held_out])
    medians = dict(zip(("median", "flat", "scaled"), np.nanmedian(errors, 0).tolist(), strict=True))
    p90 = float(np.quantile(errors[:, 0], 0.9))
    row = {"held_out": kind, "kernels": len(judged), "rows": len(errors), "p90": p90, "bounds": BOUNDS[kind]}
    met = medians["median"] <= BOUNDS[kind][0] and p90 <= BOUNDS[kind][1]
    return row | medians | {"beyond": sum(kernel.beyond for kernel in judged), "met": met}


def ratios(found: list[Kernel]) -> Row:
    """The table's row of the fused layer under two distributions: which is faster, and by how much."""
    pairs = np.array([pair for kernel in found for pair in kernel.ratios])
    median = float(np.median(np.abs(pairs[:, 0] / pairs[:, 1] - 1)))
    differ = np.abs(pairs[:, 1] - 1) > DIFFER
    wrong = int((differ & ((pairs[:, 0] > 1) != (pairs[:, 1] > 1))).sum())
    told = {"held_out": f"fused, ratio of two ({differ.sum()} differ by > 3 %)", "rows": len(pairs)}
    return told | {
        "median": median,
        "wrong_signs": wrong,
        "bounds": [RATIO],
        "met": median <= RATIO and not wrong,
    }


def write(name: str, columns: tuple[str, ...], rows: list[Row]) -> int:
    """Bytes of a file of constants, a line for each row."""
    source = f"{tables.WHEEL} {tables.version()} (Apache-2.0), fitted by bench/fit_times.py"
    lines = [json.dumps([row.get(name) for name in columns], separators=(",", ":")) for row in rows]
    head = f'{{"source": {json.dumps(source)},\n"columns": {json.dumps(columns)},\n"rows": [\n'
    path = SHIPPED / f"{name}.json"
    path.write_text(head + ",\n".join(lines) + "\n]}\n")
    return path.stat().st_size


def stale(experts: list[Row], joined: list[Row]) -> list[str]:
    """What is shipped otherwise than it is fitted now."""
    wrong = [] if len(available()) == len(experts) + len(joined) else [f"{len(available())} are shipped"]
    for row in experts:
        slots, copies, rows, _ = row["example"]
        loads = np.full(slots, copies)
        try:
            seconds = ExpertTime.load(**{name: row[name] for name in WHAT}).seconds(loads, rows)
        except ValueError as error:
            wrong.append(str(error))
        else:
            if abs(seconds / timed(row).seconds(loads, rows) - 1) > SAME:
                wrong.append(" ".join(str(row[name]) for name in WHAT))
    for row in joined:
        for step in STEPS:
            try:
                seconds = AllToAllTime.load(step=step, **{name: row[name] for name in JOINED}).seconds(
                    row["tokens_to"]
                )
            except ValueError as error:
                wrong.append(str(error))
            else:
                if abs(1e6 * seconds[1] / Curve(*row[step])(np.float64(row["tokens_to"])) - 1) > SAME:
                    wrong.append(" ".join(str(row[name]) for name in JOINED))
    return wrong


def newest(rows: list[Row], names: tuple[str, ...]) -> list[Row]:
    """Those to ship: of several with the same names the first."""
    first: dict[Any, Row] = {}
    for row in rows:
        if "left_out" not in row:
            first.setdefault(tuple(row[name] for name in names), row)
    return list(first.values())


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    begin(__doc__)
    data = tables.folder()
    found, curves = list(kernels(data)), list(exchanges(data))
    summary = [held_out(kind, [kernel for kernel in found if kernel.is_["kind"] == kind]) for kind in BOUNDS]
    summary.append(ratios(found))
    show("Relative errors of held-out rows, fitted on even ones alone", HELD_OUT, summary)
    rows = [kernel.is_ for kernel in found]
    experts, joined = newest(rows, WHAT), newest(curves, JOINED)
    print(f"\n{len(experts)} of {len(rows)} kernels and {len(joined)} of {len(curves)} exchanges to ship")
    if asked.check:
        old = stale(experts, joined)
        print(*(f"  STALE {name}" for name in old), sep="\n")
        return int(bool(old) or not all(row["met"] for row in summary))
    size = write("experts", EXPERTS, experts) + write("exchanges", EXCHANGES, joined)
    print(f"{size} bytes in {SHIPPED}")
    names = (*WHAT, "version", *TOLD, "even_rows", "left_out", "ranks", "nodes", "top_k")
    kept = [{name: row[name] for name in names if name in row} for row in rows + curves]
    print(write_results("fit_times", summary + kept))
    return int(not all(row["met"] for row in summary))


if __name__ == "__main__":
    sys.exit(main())
