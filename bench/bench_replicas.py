"""Balance by policy on real routing, without shared experts: what exactness and quotas are worth.

Fairness ledger
- Traces, drawn tokens and calibration as in bench_balance.py: the placement (`eplb`) never saw the workload it is
  judged on; gpt-oss-20b has one workload, the first half calibrates.
- exact, lp: quotas; even: equal quotas; lp_sampled, dynamic: the same fractions, drawn for every copy.
- affine5, affine5_sampled: OUR form of the published five-step affine scaling: its fractions rounded to quotas
  (lib/published_policies.py), which shows what the five steps cost alone, and drawn, as SGLang's `lp` dispatch draws.
  Where its acceptance test fails it falls back to equal parts, as published.
- `over` is the mean over (layer, batch) of the busiest rank's copies over exact's proved bound; `sampling` = how much
  lp_sampled is above lp, `five steps` = how much affine5 is above exact, `published` = affine5_sampled above exact.
- A few layers and one batch per fold; all figures are counted from routed slots, none is a time.

Usage: python bench/bench_replicas.py [--traces FOLDER]   (npz files; what is not there is left out and said)
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from bench_balance import TRACES, load_trace
from isoload.analysis.simulate import ReplaySettings, replay
from lib import table
from lib.harness import command, machine, write_results
from lib.published_policies import registered
from lib.result_tables import by
from lib.trace_files import add_traces, present, rows_or_end

CASES = ((8, 32), (16, 32), (32, 64), (64, 64), (128, 128))  # ranks, replicas of 256 experts
SMALL_CASES = ((8, 8), (16, 16))  # of gpt-oss-20b's 32
TOKENS = (64, 256, 1024, 4096, 16384, 65536)
AFFINE = {"affine5": "lp_affine", "affine5_sampled": "lp_sampled:method=affine"}
POLICIES = ("exact", "lp", "lp_sampled", "even", "dynamic", *AFFINE)


def run(path: Path, ranks: int, replicas: int, tokens: int) -> list[dict[str, Any]]:
    """One cell: a row per policy."""
    trace, calibrate = load_trace(path, tokens)
    settings = ReplaySettings(
        num_ranks=ranks,
        ranks_per_node=8,
        slots_per_rank=(trace.num_experts + replicas) // ranks,
        calibrate=calibrate,
        batch_tokens=tokens,
        max_batches=1,
        policies=tuple(AFFINE.get(name, name) for name in POLICIES),
    )
    with registered():
        found = replay(trace, settings)
    where = {"trace": TRACES[path.stem], "ranks": ranks, "replicas": replicas, "tokens": tokens}
    size = {"layers": found.layers, "batches": found.batches}
    rows = zip(POLICIES, map(dataclasses.asdict, found.policies), strict=True)
    return [{**where, **size, **row, "policy": name} for name, row in rows]


def print_costs(rows: list[dict[str, Any]]) -> None:
    """Per trace: how far each policy is over the bound, %, and what sampling and five steps cost."""
    columns = {
        "R + replicas": "{exact[ranks]}+{exact[replicas]}",
        "tokens": "{exact[tokens]}",
        "imbalance of exact": "{exact[imbalance_mean]:.3f}",
        **table.same(POLICIES[1:], "{NAME[gap_mean]:.2f*100}"),
        "sampling": lambda cell: f"{100 * (over(cell, 'lp_sampled') / over(cell, 'lp') - 1):+.2f}",
        "five steps": "{affine5[gap_mean]:+.2f*100}",
        "published": "{affine5_sampled[gap_mean]:+.2f*100}",
    }
    for name in dict.fromkeys(row["trace"] for row in rows):
        cells = by([row for row in rows if row["trace"] == name], "ranks", "replicas", "tokens").values()
        table.show(f"{name}: busiest rank over exact's bound, %", columns, cells)


def over(cell: dict[str, Any], policy: str) -> float:
    return 1 + float(cell[policy]["gap_mean"])


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for stem, path in present(arguments.traces, *TRACES).items():
        for ranks, replicas in SMALL_CASES if "gptoss" in stem else CASES:
            for tokens in arguments.tokens:
                rows += run(path, ranks, replicas, tokens)
                print(stem, ranks, replicas, tokens, file=sys.stderr)
    rows_or_end(rows, TRACES)
    print_costs(rows)
    print(machine())
    if not arguments.no_write:
        print(f"written: {write_results('bench_replicas', rows)}")


if __name__ == "__main__":
    main()
