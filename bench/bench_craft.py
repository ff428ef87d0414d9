"""CRAFT's replication factors: balance of unseen batches without replicas, with R of a rank, and with EPLB's slot more.

Fairness ledger
- Shapes as CRAFT evaluates: 256 and 384 experts, 32 to 96 ranks, R = 1, 2, 4, 8, 16 replicas of a rank over all layers
  (CRAFT, section 5.1 and appendix B). `base`: R = 0, `eplb`: a slot more on every rank and layer.
- Loads are DeepSeek-V3's, every other batch to place by and the others to judge. The 384 experts are made: 128 of each
  layer are those of the layer 7 behind it, shuffled, each times exp(0.2 normal); no model was recorded.
- Balance is mean / max rank load, replicas sharing their expert's load alike, mean over unseen batches and layers.
- `gain`: the R of the largest worth per replica, which section 4.2.1 says and which is 1 wherever worth is concave in
  R, as a knapsack's is but for its grid; `knee`: ours, the default. The paper's deployments get 8.
- 2^30 bytes: what the replicas of R = knee take of a rank, with experts of 3 x 7168 x 2048 FP8 weights.

Usage: python bench/bench_craft.py [--traces FOLDER] [--write]
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isoload
from isoload.analysis.judge import even_imbalance
from isoload.times.exchanges import DEEPSEEK_V3_FP8
from lib import table
from lib.harness import command, write_results
from lib.trace_files import add_traces, need

FACTORS = (1, 2, 4, 8, 16)


def widened(counts: np.ndarray, experts: int) -> np.ndarray:
    """Counts [B, L, E] of more experts, see the ledger."""
    draw, more = np.random.default_rng(0), experts - counts.shape[2]
    if not more:
        return counts
    other = np.roll(counts, -7, axis=1)[:, :, draw.permutation(counts.shape[2])[:more]]
    factor = np.exp(0.2 * draw.standard_normal((1, counts.shape[1], more)))
    return np.concatenate([counts, np.rint(other * factor).astype(counts.dtype)], 2)


def balance(placement: isoload.Placement, unseen: np.ndarray) -> float:
    return float((1 / even_imbalance(placement, unseen)).mean())


def row(counts: np.ndarray, ranks: int) -> dict[str, Any]:
    seen, unseen = counts[::2], counts[1::2]
    topology = isoload.Topology(ranks)
    made = {
        how: isoload.place(seen, topology, placer="craft", replicas=how)
        for how in (0, *FACTORS, "gain", "knee")
    }
    chosen = {how: sum(made[how].provenance["replicas_by_layer"]) // ranks for how in ("gain", "knee")}
    slots = -(-counts.shape[2] // ranks) + 1
    return {
        "experts": counts.shape[2],
        "ranks": ranks,
        "base": balance(made[0], unseen),
        **{f"R{how}": balance(made[how], unseen) for how in FACTORS},
        **chosen,
        "at_knee": balance(made["knee"], unseen),
        "gib_at_knee": chosen["knee"] * DEEPSEEK_V3_FP8 / 2**30,
        "eplb": balance(isoload.place(seen, topology, slots, "eplb"), unseen),
        "gib_eplb": (slots * ranks - counts.shape[2]) / ranks * counts.shape[1] * DEEPSEEK_V3_FP8 / 2**30,
    }


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--write", action="store_true", help="bench/results/bench_craft.jsonl")
    arguments = parser.parse_args()
    (trace,) = need(arguments.traces, "dsv3_sglang_longin")
    counts = trace.batch_counts()
    rows = [row(widened(counts, experts), ranks) for experts in (256, 384) for ranks in (32, 48, 64, 96)]
    table.show_rows("CRAFT's factors", rows, "")
    table.losses(rows)
    if arguments.write:
        print(write_results("bench_craft", rows))


if __name__ == "__main__":
    main()
