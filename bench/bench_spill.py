"""Borrowing experts: plan time, validity, and the distance of `spill_cost` to the bound of a MILP.

Fairness ledger
- Quality: level / bound - 1, where level is the largest cost of a rank (copies plus 1000 per import) and bound is what
  HiGHS proves in --seconds; part of the gap is the bound's. EP: the same of plain EP. Spare slots: 4 per rank.
- llep: capacity 1.0, tolerance 0.02, chunks of 1024; peaks are max / mean of the ranks, imports and exports the most
  of a rank.
- Valid: --fuzz drawn plans through every check of the tests; one that breaks a promise ends the bench.
- Time: one op call, one layer, one thread.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from harness import measure, write_results

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from spills import SpillCase, check_spill, draw, in_order
from test_spill_cost import IMPORT, hot, least_cost_bound

SHAPES = ((8, 64), (8, 128))
TOKENS = (33_000, 66_000, 262_144)
LLEP = {"min_chunk": 1024, "tolerance": 0.02}
COST = {"capacity_factor": None, "import_costs": (IMPORT, IMPORT)}


def instances() -> dict[str, SpillCase]:
    found = {}
    for ranks, experts in SHAPES:
        index = np.arange(1, experts + 1)
        kinds = {
            "80 % on 4": hot(experts, 0.8, 4),
            "95 % on 1": hot(experts, 0.95, 1),
            "50 % on 16": hot(experts, 0.5, 16),
            "Zipf 0.8": 1 / index**0.8,
            "Zipf 1.2": 1 / index**1.2,
            "log-normal": np.random.default_rng(1).lognormal(0, 1, experts),
        }
        for name, weights in kinds.items():
            for tokens in TOKENS:
                weights = np.random.default_rng(0).permutation(weights)
                loads = np.random.default_rng(tokens).multinomial(tokens, weights / weights.sum())
                found[f"R{ranks} E{experts} {tokens} {name}"] = in_order(loads, ranks)
    return found


def judge(name: str, case: SpillCase, seconds: float) -> dict[str, Any]:
    llep, cost = case.spill(**LLEP), case.spill(**COST)
    check_spill(SpillCase(**{**vars(case), "rules": LLEP}), llep)
    check_spill(SpillCase(**{**vars(case), "rules": COST}), cost)
    bound, mean = least_cost_bound(case, IMPORT, seconds), case.plain().sum() / case.num_ranks
    row: dict[str, Any] = {"instance": name, "gap": int(cost.level) / bound - 1, "bound": bound / mean}
    row["ep"] = case.plain().max() / mean
    for policy, spill in (("llep", llep), ("cost", cost)):
        row[f"{policy}_peak"] = int(spill.quota.view(case.num_ranks, -1).sum(1).max()) / mean
        row[f"{policy}_moves"] = spill.telemetry[:3].tolist()
    return row


def times() -> list[dict[str, Any]]:
    rows = []
    for ranks in (8, 64):
        weights = np.random.default_rng(1).permutation(1 / np.arange(1, 257))
        loads = np.random.default_rng(2).multinomial(ranks * 32_768, weights / weights.sum())
        case = in_order(loads, ranks, spare=2)
        for name, rules in (("llep", LLEP), ("spill_cost", COST)):
            timing = measure(lambda case=case, rules=rules: case.spill(**rules))
            rows.append({"time": name, "ranks": ranks, "us": timing.median, "p99_us": timing.p99})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of HiGHS per instance")
    parser.add_argument("--fuzz", type=int, default=100_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = times()
    for seed in range(10**6, 10**6 + asked.fuzz):
        check_spill(case := draw(seed), case.spill())
    print(f"{asked.fuzz} drawn plans are valid")
    table = Table(title="spill_cost against the bound of a MILP")
    for column in ("instance", "ep", "llep peak", "llep moves", "cost peak", "cost moves", "gap"):
        table.add_column(column)
    for name, case in instances().items():
        row = judge(name, case, asked.seconds)
        rows.append(row)
        moves = [" / ".join(map(str, row[f"{policy}_moves"])) for policy in ("llep", "cost")]
        peaks = [f"{row[key]:.3f}" for key in ("ep", "llep_peak", "cost_peak")]
        table.add_row(name, peaks[0], peaks[1], moves[0], peaks[2], moves[1], f"{row['gap']:.2%}")
    Console().print(table)
    gaps = [row["gap"] for row in rows if "gap" in row]
    print(f"gap: mean {np.mean(gaps):.2%}, largest {max(gaps):.2%}")
    print(write_results("bench_spill", rows))


if __name__ == "__main__":
    main()
