"""Balance by policy on real routing, with a shared expert: the matrix of Waterfill's blog as a replay.

Fairness ledger
- Traces: DeepSeek-V3 (8 workloads: SGLang's issue 6017), GLM-5.2 (6 text domains: github.com/Dorijan10/
  glm-expert-pruning) and gpt-oss-20b (decode steps, joined into 8 stretches), each from counts: tokens are drawn, K
  distinct experts each, layer by layer. The first two state no licence, so only gpt-oss is shipped, as a cut.
- One shared expert, which costs as much as a routed one. gpt-oss has none: it is replayed as if it had.
- Placement: `trivial` (no EPLB) or `eplb` with 0, 16 or 32 replicas on R = 16 ranks, 2 nodes; it never sees the
  workload it is judged on (leave-cluster-out; gpt-oss has one: the first half).
- shared_local, waterfill and waterfill_sampled split the routed experts alike (`even`); `exact` keeps the shared
  expert at home; `joint` decides both. waterfill_sampled is our re-implementation of SGLang's two published rules.
- All figures are counted from routed slots. `busiest` is the mean imbalance relative to shared_local's, less 1: if
  experts take the share x of a step and wait for the busiest rank, the step changes by x * busiest. What rows cost
  on the network is not in it; `rows` says how many more leave their rank. Nothing here is a time.
- A few layers and one batch per fold: the spread over them is what `imbalance_p99` says.

Usage: python bench/bench_balance.py [--traces FOLDER]   (npz files; what is not there is left out and said, the
shipped trace always is. The results file is written only by --write.)
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from isoload.analysis.simulate import ReplaySettings, replay
from isoload.traces import Trace, read_trace
from lib import table
from lib.harness import command, machine, write_results
from lib.result_tables import by
from lib.trace_files import SHIPPED, add_traces, present

RANKS, NODE = 16, 8
TRACES = {
    "dsv3_sglang_longin": "DeepSeek-V3",
    "glm52_domains_a": "GLM-5.2",
    "gptoss20b_decode_mmlu": "gpt-oss-20b",
    "gptoss20b_decode": "gpt-oss-20b, shipped cut",
}
PLACEMENTS = {"no EPLB": ("trivial", 0), "red0": ("eplb", 0), "red16": ("eplb", 16), "red32": ("eplb", 32)}
TOKENS = (64, 256, 1024, 4096, 16384, 65536)
POLICIES = (
    "shared_local",
    "waterfill_sampled:rule=static",
    "waterfill_sampled:rule=dynamic",
    "waterfill",
    "exact",
    "joint",
)
SHORT = ("shared_local", "sampled static", "sampled dynamic", "waterfill", "exact", "joint")
LEFT_OUT = ("plan_us", "node_dispatch")  # times; rows by nodes, which bench_route and bench_grace have


def load_trace(path: Path, tokens: int) -> tuple[Trace, str]:
    """A trace of counts with so many layers as keep the run short, and how it is calibrated."""
    whole = read_trace(path)
    assert whole.counts is not None
    counts = whole.counts
    if whole.cluster is None:  # one long run of decode steps: stretches, the first half calibrates
        first = 10 if len(counts) > 100 else 0  # a whole run starts with template tokens
        counts = np.stack([part.sum(0) for part in np.array_split(counts[first:], 8)])
    layers = np.linspace(0, counts.shape[1] - 1, 8 if tokens <= 4096 else 3).astype(int)
    trace = Trace(
        whole.name,
        whole.num_experts,
        whole.top_k,
        np.ascontiguousarray(counts[:, layers]),
        cluster=whole.cluster,
        layer_ids=tuple(whole.layer_ids[i] for i in layers),
        provenance=whole.provenance,
    )
    return trace, "first-half" if whole.cluster is None else "leave-cluster-out"


def run(path: Path, placement: str, tokens: int) -> list[dict[str, Any]]:
    """One cell of the matrix: a row per policy."""
    trace, calibrate = load_trace(path, tokens)
    placer, replicas = PLACEMENTS[placement]
    settings = ReplaySettings(
        num_ranks=RANKS,
        ranks_per_node=NODE,
        slots_per_rank=(trace.num_experts + replicas) // RANKS + 1,
        shared_experts=1,
        placer=placer,
        calibrate=calibrate,
        batch_tokens=tokens,
        max_batches=1,
        policies=POLICIES,
    )
    found = replay(trace, settings)
    base = found.policies[0]
    return [
        {
            "trace": TRACES[path.stem],
            "placement": placement,
            "tokens": tokens,
            "layers": found.layers,
            "batches": found.batches,
            "busiest": row.imbalance_mean / base.imbalance_mean - 1,
            "rows": row.remote_rank_rows / base.remote_rank_rows - 1,
            **{key: value for key, value in dataclasses.asdict(row).items() if not key.startswith(LEFT_OUT)},
        }
        for row in found.policies
    ]


def print_matrix(rows: list[dict[str, Any]]) -> None:
    """Per trace and placement: the busiest rank against shared_local, by tokens; then the traffic that it costs."""
    drawn = [SHORT[i] for i in (1, 2, 3, 5)]
    columns = {
        **table.same(("placement", "tokens"), "{at[NAME]}"),
        "imbalance": "{at[imbalance_mean]:.3f}",
        **table.same(SHORT[1:], "{NAME[busiest]:+.1f*100} %"),
        "shared copies unvisited": " / ".join(
            f"{{{name}[shared_unvisited_share]:.1f*100}}" for name in drawn
        ),
        "rows": " / ".join(f"{{{name}[rows]:+.1f*100}}" for name in drawn),
    }
    for name in dict.fromkeys(row["trace"] for row in rows):
        cells = by([row for row in rows if row["trace"] == name], "placement", "tokens").values()
        named = [dict(zip(("at", *SHORT[1:]), cell.values(), strict=True)) for cell in cells]
        table.show(
            f"{name}, R={RANKS}: busiest rank relative to shared_local (its imbalance)", columns, named
        )
    print(
        "unvisited: % of shared copies sent to a rank where the token has no routed copy; rows: change in rows that "
        "leave their rank, %; both for sampled static / sampled dynamic / waterfill / joint"
    )


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--write", action="store_true", help="bench/results/bench_balance.jsonl")
    arguments = parser.parse_args()
    rows = []
    found = present(arguments.traces, *(stem for stem in TRACES if stem != SHIPPED.stem))
    for stem, path in (found | {SHIPPED.stem: SHIPPED}).items():
        for placement in PLACEMENTS:
            for tokens in arguments.tokens:
                rows += run(path, placement, tokens)
                print(stem, placement, tokens, file=sys.stderr)
    print_matrix(rows)
    print(machine())
    if arguments.write:
        print(f"written: {write_results('bench_balance', rows)}")


if __name__ == "__main__":
    main()
