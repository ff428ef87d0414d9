"""Where shared copies go when they must leave home: to ranks that their token visits anyway, or to others.

A shared copy on a rank that the token does not visit costs a row of its own on the network; elsewhere it is free.

Fairness ledger
- Instances: Zipf 0.8 popularity, placed by `eplb` before a drift of exp(drift N(0,1)) per expert; every token draws K
  distinct experts. Routed copies are split exactly, the same for all rules; SEEDS instances per row, all source ranks.
- figures: unvisited shared copies / shared copies; `of moved` compares them as parts of the copies that left home,
  of which static has many more. A row without ratio: ours sends none. peak: the busiest rank's copies / the least
  possible over all places of the shared copies (ceil), mean over instances.
- static, dynamic (SGLang) and blog are our re-implementation. SGLang leaves batches below 64 rows per rank at home:
  no traffic, and no balance (peak of `home`). There its rules are shown as if rows were padded to 64.
- counts: the same quotas as ours, shared out by counts alone (own rank, own node, then all), matched by the same
  route_shared. ours: plan_waterfill and route_shared.
- best: the least unvisited copies of any assignment at this peak (maximum flow over single tokens). It may let home
  give way to other ranks' copies, which ours never does: it moves no copy that need not move.
- Losses: with top-2 a token visits few ranks: ours is above best, where home would have to give way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

import isoload
from isoload import ops
from lib import table
from lib.harness import begin, command, write_results
from lib.result_tables import SHARED_TRAFFIC

SEEDS = 8
GATE = 64  # rows per rank below which SGLang stays at home
RATIOS = ("fewer", "fewer_of_moved")


@dataclass(frozen=True)
class Setting:
    ranks: int
    replicas: int
    tokens: int  # per rank
    drift: float
    experts: int = 256
    top_k: int = 8


SETTINGS = (
    Setting(16, 32, 64, 0.5),
    Setting(16, 32, 16, 1.0),
    Setting(32, 64, 32, 0.5),
    Setting(32, 64, 32, 1.0),
    Setting(16, 0, 64, 0.5),
    Setting(16, 32, 256, 1.0),
    Setting(64, 64, 64, 0.5),
    Setting(16, 16, 64, 0.5, 64, 2),
    Setting(16, 16, 64, 1.0, 64, 2),
)


@dataclass(frozen=True)
class Batch:
    """slots [R, T, K] of all ranks' tokens, S slots per rank; copies [R, R] that they come to."""

    slots: Tensor
    size: int
    copies: Tensor
    per_node: int

    @property
    def tokens(self) -> Tensor:
        return torch.full((len(self.slots),), self.slots.shape[1], dtype=torch.int32)

    def visited(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[R, T, R] whether a token is on a rank anyway: it has a routed copy there, or it is its home."""
        visited = np.zeros((*self.slots.shape[:2], len(self.slots)), dtype=bool)
        np.put_along_axis(visited, (self.slots // self.size).numpy(), True, -1)
        home = np.arange(len(self.slots))
        visited[home, :, home] = True
        return visited


def make_batch(setting: Setting, seed: int) -> Batch:
    ranks, experts, top_k = setting.ranks, setting.experts, setting.top_k
    draw = np.random.default_rng([ranks, setting.replicas, setting.tokens, top_k, seed])
    zipf = draw.permutation(1 / np.arange(1, experts + 1) ** 0.8)
    topology = isoload.Topology(ranks, min(8, ranks))
    size = (experts + setting.replicas) // ranks
    placement = isoload.place(torch.from_numpy(zipf)[None], topology, size)
    scores = np.log(zipf) + setting.drift * draw.standard_normal(experts)
    scores = scores + draw.gumbel(size=(ranks, setting.tokens, experts))
    topk_ids = torch.from_numpy(np.argpartition(-scores, top_k, -1)[..., :top_k].copy())
    loads = torch.stack([isoload.count(ids, experts) for ids in topk_ids])
    plan = isoload.plan(loads, placement, 0)
    slots = torch.stack([isoload.route(ids, loads, plan, rank=r) for r, ids in enumerate(topk_ids)])
    copies = torch.stack([isoload.count(row, ranks) for row in slots // size])
    return Batch(slots, size, copies, topology.ranks_per_node)


def by_share(batch: Batch, share: Tensor) -> Tensor:
    """[R, T] the rank of every shared copy under a share [R, R]."""
    rows = zip(batch.slots, share, strict=True)
    return torch.cat([ops.route_shared(s, row, batch.size, r) for r, (s, row) in enumerate(rows)], 1).T


def by_counts(batch: Batch, share: Tensor) -> Tensor:
    """The same copies per rank, but who sends them is decided as for any expert with a replica on every rank."""
    ranks = len(share)
    tables = ops.replica_tables(torch.zeros(ranks, dtype=torch.int32), ranks, 1)
    quota = share.sum(0, dtype=torch.int32)
    return by_share(batch, ops.share_by_rank(batch.tokens[:, None], quota, tables, batch.per_node))


def by_draw(batch: Batch, rule: ops.SharedRule, seed: int) -> Tensor:
    """[R, T] drawn ranks; rows padded to SGLang's gate."""
    tokens, everywhere = batch.slots.shape[1], batch.copies.sum(0, dtype=torch.int32)
    rows = []
    for rank, slots in enumerate(batch.slots):
        load = batch.copies[rank] if rule == "static" else everywhere
        padded = torch.nn.functional.pad(slots, (0, 0, 0, max(0, GATE - tokens)), value=-1)
        stream = seed * len(batch.slots) + rank
        drawn = ops.route_shared_sampled(padded, load, batch.tokens, batch.size, rank, rule, stream)
        rows.append(drawn[:tokens, 0])
    return torch.stack(rows)


def least_unvisited(batch: Batch, peak: int) -> int:
    """Shared copies that no assignment with this peak brings to their home or to a rank they visit."""
    visited = batch.visited().reshape(-1, len(batch.slots))
    tokens, ranks = visited.shape
    source, sink = tokens + ranks, tokens + ranks + 1
    token, rank = np.nonzero(visited)
    room = (peak - batch.copies.sum(0)).numpy()
    tail = np.concatenate([np.full(tokens, source), token, tokens + np.arange(ranks)])
    head = np.concatenate([np.arange(tokens), tokens + rank, np.full(ranks, sink)])
    width = np.concatenate([np.ones(tokens + len(token)), room]).astype(np.int32)
    graph = csr_array((width, (tail, head)), shape=(sink + 1, sink + 1))
    return tokens - int(maximum_flow(graph, source, sink).flow_value)


def measure_batch(batch: Batch, seed: int) -> dict[str, tuple[float, float, float]]:
    """By rule: shared copies unvisited, moved (shares of all) and the peak over the least one."""
    poured = ops.plan_waterfill(batch.copies, batch.tokens, 1, batch.per_node)
    home = torch.arange(len(batch.slots))[:, None].expand(batch.slots.shape[:2])
    chosen = {
        "home": home,
        "static": by_draw(batch, "static", seed),
        "dynamic": by_draw(batch, "dynamic", seed),
        "blog": by_draw(batch, "blog", seed),
        "counts": by_counts(batch, poured.share),
        "ours": by_share(batch, poured.share),
    }
    visited, base, found = batch.visited(), batch.copies.sum(0), {}
    for rule, ranks in chosen.items():
        met = np.take_along_axis(visited, ranks.long().numpy()[..., None], -1).mean()
        peak = int((base + ranks.flatten().bincount(minlength=len(base))).max())
        moved = float((ranks != home).double().mean())
        found[rule] = 1 - float(met), moved, peak / int(poured.peak)
    best = least_unvisited(batch, int(poured.peak)) / home.numel()
    return found | {"best": (best, float("nan"), 1.0)}


def bench_setting(setting: Setting) -> dict[str, Any]:
    found = [measure_batch(make_batch(setting, seed), seed) for seed in range(SEEDS)]
    mean = {rule: np.mean([one[rule] for one in found], axis=0) for rule in found[0]}
    ours = mean["ours"][0]
    of_moved = {rule: mean[rule][0] / mean[rule][1] for rule in ("static", "ours")}
    return {
        **vars(setting),
        "seeds": SEEDS,
        "unvisited": {rule: round(float(m[0]), 6) for rule, m in mean.items()},
        "moved": {rule: round(float(m[1]), 6) for rule, m in mean.items() if rule != "best"},
        "peak": {rule: round(float(m[2]), 6) for rule, m in mean.items()},
        "worst_peak_of_ours": max(one["ours"][2] for one in found),
        "fewer": round(float(mean["static"][0] / ours), 2) if ours else None,
        "fewer_of_moved": round(float(of_moved["static"] / of_moved["ours"]), 2) if ours else None,
    }


def main() -> None:
    command(__doc__).parse_args()
    begin(__doc__)
    rows = [bench_setting(setting) for setting in SETTINGS]
    more = {
        "of moved": "{fewer_of_moved:.0f}x",
        **table.same(("home",), "{unvisited[NAME]:.2f*100} ({peak[NAME]:.3f})"),
    }
    title = "Shared copies on ranks that their token does not visit, % of all (busiest rank over the least possible)"
    table.show(title, {**SHARED_TRAFFIC, **more}, rows)
    print("written:", write_results("bench_shared_traffic", rows).name)


if __name__ == "__main__":
    main()
