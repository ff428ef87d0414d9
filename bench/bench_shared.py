"""Shared experts on one CPU core: pouring their copies over the ranks, alone and after the exact split; routing them.

Fairness ledger
- Instances: as bench_plan.py (E = 256, top-8, Zipf 0.8, placed by `eplb` before a drift of exp(0.5 N(0,1)), 1,000 to
  200,000 global tokens, 58 layers), with loads per source rank and one shared expert.
- per layer: one op call of all 58 instances, time / 58; median over calls. `exact` reads loads [R, E] and sums them.
- joint: exact with `pour`, share_by_rank and plan_waterfill, the three ops of policy joint; the sum of their times.
- p99: of plan_waterfill on single instances: one op call of 58 copies of it, time / 58.
- public call: isoload.plan(loads [R, E+1], placement, layer=..., policy=...) in Python, checks and allocations
  included; median over instances.
- tokens of one rank: 4096 x 8 routed slots, one shared column, on the rank that sends most nearly half of its shared
  copies away (`moved`). route_shared meets its share row exactly; the two sampled forms are our re-implementation of
  SGLang's rules on CPU and say nothing of its kernels' speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload import ops
from isoload.policies.shared import rank_copies
from lib import table
from lib.harness import begin, command, measure, over_instances, write_results
from lib.result_tables import SHARED_PLANNING

EXPERTS, LAYERS, TOP_K, TOKENS = 256, 58, 8, 4096
CASES = [(16, 32), (32, 64), (64, 128), (128, 128)]  # ranks, replicas
POLICIES = ("exact", "waterfill", "joint")


class Case(NamedTuple):
    """A placement of 58 layers with one shared expert, and one later batch: loads [58, R, E + 1]."""

    placement: isoload.Placement
    loads: Tensor

    @property
    def routed(self) -> Tensor:
        """[58, R, E]"""
        return self.loads[..., :EXPERTS].contiguous()

    @property
    def tokens(self) -> Tensor:
        """[58, R]"""
        return self.loads[..., EXPERTS].contiguous()


def make_case(ranks: int, replicas: int, seed: int) -> Case:
    draw = np.random.default_rng(seed)
    zipf = 1 / np.arange(1, EXPERTS + 1) ** 0.8
    popularity = np.stack([draw.permutation(zipf) for _ in range(LAYERS)])
    topology = isoload.Topology(ranks, min(8, ranks))
    slots_per_rank = (EXPERTS + replicas) // ranks + 1
    placement = isoload.place(popularity / zipf.sum() * 1e6, topology, slots_per_rank, num_shared=1)
    live = popularity * np.exp(0.5 * draw.standard_normal(popularity.shape))
    loads = np.zeros((LAYERS, ranks, EXPERTS + 1), dtype=np.int32)
    for layer, shares in enumerate(live / live.sum(1, keepdims=True)):
        tokens = int(np.exp(draw.uniform(np.log(1e3), np.log(2e5))))
        loads[layer, :, EXPERTS] = draw.multinomial(tokens, np.full(ranks, 1 / ranks))
        loads[layer, :, :EXPERTS] = draw.multinomial(TOP_K * loads[layer, :, EXPERTS], shares)
    return Case(placement, torch.from_numpy(loads))


def bench_planners(case: Case) -> dict[str, float]:
    """Microseconds per layer of every op between loads and the share of the shared copies."""
    routed, tokens, tables = case.routed, case.tokens, case.placement.layers("cpu").tables
    per_node, pour = case.placement.topology.ranks_per_node, case.tokens.sum(-1, dtype=torch.int32)
    quota = ops.plan_exact(routed, tables, pour=pour).quota
    copies = ops.share_by_rank(routed, quota, tables, per_node)
    poured = ops.plan_waterfill(copies, tokens, 1, per_node)
    assert torch.equal(poured.peak, poured.bound), "not the lowest level"
    times = {
        "exact_us": measure(lambda: ops.plan_exact(routed, tables), LAYERS).median,
        "exact_pour_us": measure(lambda: ops.plan_exact(routed, tables, pour=pour), LAYERS).median,
        "share_by_rank_us": measure(
            lambda: ops.share_by_rank(routed, quota, tables, per_node), LAYERS
        ).median,
        "waterfill_us": measure(lambda: ops.plan_waterfill(copies, tokens, 1, per_node), LAYERS).median,
    }
    times["joint_us"] = times["exact_pour_us"] + times["share_by_rank_us"] + times["waterfill_us"]
    single = []
    for layer in range(LAYERS):
        same = copies[layer].repeat(LAYERS, 1, 1), tokens[layer].repeat(LAYERS, 1)
        single.append(measure(lambda s=same: ops.plan_waterfill(*s, 1, per_node), LAYERS, 0.01).median)
    return times | {"waterfill_p99_us": over_instances(single).p99}


def bench_public(case: Case) -> dict[str, float]:
    """Median over instances of one isoload.plan call per policy."""
    medians: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for layer in range(LAYERS):
        row = case.loads[layer].clone()
        for policy in POLICIES:
            made = isoload.plan(row, case.placement, layer, policy)
            assert policy == "waterfill" or int(made.peak) == int(made.bound), "not the optimum"
            call = measure(lambda r=row, i=layer, p=policy: isoload.plan(r, case.placement, i, p), 1, 0.01)
            medians[policy].append(call.median)
    return {policy: float(np.median(values)) for policy, values in medians.items()}


def bench_tokens(case: Case) -> dict[str, float]:
    """The tokens of one rank in layer 0: their shared copies by three rules, and the extra column."""
    placement = case.placement
    ranks, routed_slots = placement.topology.num_ranks, placement.slots_per_rank - 1
    draw = torch.Generator().manual_seed(1)
    popularity = case.routed[0].sum(0).float() + 1
    ids = [torch.multinomial(popularity.expand(TOKENS, -1), TOP_K, generator=draw) for _ in range(ranks)]
    shared = torch.full((TOKENS, 1), EXPERTS)
    ids = [torch.cat([row, shared], 1) for row in ids]
    loads = torch.stack([isoload.count(row, EXPERTS + 1) for row in ids])
    plan = isoload.plan(loads, placement, 0, "joint")
    assert plan.shared is not None and plan.shared.by_rank is not None
    copies = rank_copies(loads[:, :EXPERTS].contiguous(), plan)
    tokens = plan.shared.tokens
    rank = int((plan.shared.by_rank.diagonal() - TOKENS // 2).abs().argmin())
    share, everywhere = plan.shared.by_rank[rank], copies.sum(0, dtype=torch.int32)
    size, slots = (
        placement.slots_per_rank,
        isoload.route(ids[rank], loads, plan, rank)[:, :TOP_K].contiguous(),
    )
    chosen = ops.route_shared(slots, share, size, rank)
    assert torch.equal(chosen.flatten().bincount(minlength=ranks).int(), share), "the share is met"
    compact = slots // size * routed_slots + slots % size  # as before the shared slots were made
    weights = torch.rand(TOKENS, TOP_K)
    return {
        "route_shared_us": measure(lambda: ops.route_shared(slots, share, size, rank)).median,
        "static_us": measure(
            lambda: ops.route_shared_sampled(slots, copies[rank], None, size, rank, "static")
        ).median,
        "dynamic_us": measure(
            lambda: ops.route_shared_sampled(slots, everywhere, tokens, size, rank, "dynamic")
        ).median,
        "append_us": measure(lambda: ops.append_shared_expert(compact, weights, chosen, routed_slots)).median,
        "moved_share": 1 - float(share[rank]) / TOKENS,
    }


def bench_case(ranks: int, replicas: int, seed: int) -> dict[str, Any]:
    case = make_case(ranks, replicas, seed)
    return {
        "ranks": ranks,
        "experts": EXPERTS,
        "replicas": replicas,
        **bench_planners(case),
        "public_us": bench_public(case),
        "tokens": TOKENS,
        **bench_tokens(case),
    }


def show(rows: list[dict[str, Any]]) -> None:
    more = {
        "waterfill p99": "{waterfill_p99_us:.1f}",
        "append": "{append_us:.0f}",
        "moved": "{moved_share:.0f*100} %",
    }
    title = f"Planning one layer; the shared copies of one rank, {TOKENS} x {TOP_K} (microseconds, one core)"
    table.show(title, {**SHARED_PLANNING, **more}, rows)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begin(__doc__)
    rows = [bench_case(ranks, replicas, asked.seed) for ranks, replicas in CASES]
    show(rows)
    print("written:", write_results("bench_shared", rows).name)


if __name__ == "__main__":
    main()
