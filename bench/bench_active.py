"""Active slots against copies: what `plan_active` wins in small batches and what it costs in large ones.

Fairness ledger
- Placement: `eplb` on the first half of a trace's batches. Batches: tokens that draw top-k distinct experts in
  proportion to the counts of the other half, layer by layer; the same batches for every split.
- slots, copies: the most active slots and the most copies of a rank, mean over layers and batches.
- time: a roofline, no measurement. A rank takes max(active slots * bytes / bandwidth, copies * flops / peak): each
  active expert's weights are read once, compute overlaps with reading; the layer takes as long as its slowest rank.
  H100 SXM: 3.35 TB/s, 1979 dense FP8 TFLOP/s; a DeepSeek-V3 expert, 3 * 7168 * 2048 weights of one byte: 13.1 us to
  read, 0.0445 us per copy, so that reading takes longer up to 295 copies per active slot.
- Not in the model: rows that travel, tiles that are not full, kernels below the peak. All three favour `exact`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import isoload
from isoload import ops
from isoload.traces import read_trace
from lib import table
from lib.harness import command, measure, write_results

WEIGHTS = 3 * 7168 * 2048
READ_US, COPY_US = WEIGHTS / 3.35e6, 2 * WEIGHTS / 1979e6


def draw_batch(rng: np.random.Generator, shares: np.ndarray, tokens: int, top_k: int) -> torch.Tensor:
    """[L, E] int32 copies of a batch whose tokens choose top_k distinct experts by shares [L, E]."""
    loads = np.zeros(shares.shape, dtype=np.int32)
    with np.errstate(divide="ignore"):
        wish = np.log(shares)
    for layer, row in zip(wish, loads, strict=True):  # largest perturbed wishes: drawn without replacement
        keys = layer + rng.gumbel(size=(tokens, len(layer)))
        np.add.at(row, np.argpartition(-keys, top_k, axis=1)[:, :top_k].ravel(), 1)
    return torch.from_numpy(loads)


def judge(quota: torch.Tensor, ranks: int) -> dict[str, float]:
    """Means over layers of quota [L, P]: most slots and most copies of a rank, roofline time."""
    per_rank = quota.view(len(quota), ranks, -1)
    slots, copies = (per_rank > 0).sum(-1).double(), per_rank.sum(-1).double()
    time = torch.maximum(slots * READ_US, copies * COPY_US).amax(-1)
    return {
        "slots": slots.amax(-1).mean().item(),
        "copies": copies.amax(-1).mean().item(),
        "us": time.mean().item(),
    }


def compare(loads: torch.Tensor, tables: Any) -> dict[str, dict[str, float]]:
    even = ops.plan_exact(loads, tables, sweeps=0, budget=0)
    exact, active = ops.plan_exact(loads, tables), ops.plan_active(loads, tables)
    assert torch.equal(active.active_peak, active.active_bound)
    quotas = {"even": even.quota, "exact": exact.quota, "active": active.quota}
    return {name: judge(quota, tables.num_ranks) for name, quota in quotas.items()}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("trace", nargs="?", default="examples/traces/gptoss20b_decode.npz")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--slots-per-rank", type=int, default=5)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 1024, 4096, 16384])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    trace = read_trace(asked.trace)
    counts = trace.batch_counts()
    half = len(counts) // 2
    later = counts[half:].sum(0)
    placement = isoload.place(counts[:half], isoload.Topology(asked.ranks), asked.slots_per_rank)
    tables = placement.layers("cpu").tables
    rows: list[dict[str, Any]] = []
    for tokens in asked.tokens:
        rng, found = np.random.default_rng(tokens), []
        for _ in range(asked.batches):
            loads = draw_batch(rng, later / later.sum(-1, keepdims=True), tokens, trace.top_k)
            found.append(compare(loads, tables))
        plan = measure(lambda loads=loads: ops.plan_active(loads, tables), units=len(loads))
        for split in found[0]:
            means = {key: float(np.mean([each[split][key] for each in found])) for key in found[0][split]}
            rows.append({"trace": trace.name, "tokens": tokens, "split": split, **means})
        rows[-1]["plan_us_per_layer"] = plan.median
    table.show_rows(f"{asked.ranks} ranks, {asked.slots_per_rank} slots each", rows)
    for row in rows:
        row |= {"ranks": asked.ranks, "slots_per_rank": asked.slots_per_rank}
    print(write_results(f"bench_active_{trace.name}", rows))


if __name__ == "__main__":
    main()
