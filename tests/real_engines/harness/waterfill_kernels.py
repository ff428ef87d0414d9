"""SGLang's Waterfill kernels in Triton's interpreter, and policy waterfill_sampled: how many choices are alike."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torchvision_names  # noqa: F401
from sglang.kernels.ops.moe.deepep_waterfill_kernels import materialize_waterfill_dispatch_fused
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.waterfill import WaterfillBalancer

import isoload

EXPERTS, RANKS, K, TOKENS = 32, 8, 4, 96
SIZE = EXPERTS // RANKS


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    skew = torch.rand(RANKS, TOKENS, EXPERTS, generator=generator).pow(2).view(-1, EXPERTS)
    ids = torch.multinomial(skew, K, generator=generator).int().view(RANKS, TOKENS, K)
    shared = torch.full((RANKS, TOKENS, 1), EXPERTS, dtype=torch.int32)
    rows = torch.cat([ids, shared], dim=2)
    table = torch.cat([torch.arange(EXPERTS).view(RANKS, SIZE), torch.full((RANKS, 1), EXPERTS)], dim=1)
    placement = isoload.Placement(table.view(1, -1), isoload.Topology(RANKS), EXPERTS + 1, num_shared=1)
    loads = torch.stack([isoload.count(of_rank, EXPERTS + 1) for of_rank in rows])
    for rule in ("static", "dynamic"):
        plan = isoload.plan(loads, placement, 0, "waterfill_sampled", routed="none", rule=rule)
        alike = 0
        for rank in range(RANKS):
            ours = isoload.route(rows[rank], loads, plan, rank)
            theirs = kernels(rule, ids, rank)
            assert torch.equal(theirs[:, :-1], ours[:, :-1])
            alike += int((theirs[:, -1] == ours[:, -1]).sum())
        print(f"{rule}: {alike} of {RANKS * TOKENS}")


def kernels(rule: str, ids: torch.Tensor, rank: int) -> torch.Tensor:
    """[T, K + 1] slots of one rank. The dynamic rule is given its all-reduced loads, which one process knows."""
    balancer = WaterfillBalancer(EXPERTS, RANKS, rank, 0, shared_weight=0.4)
    weights = torch.ones(TOKENS, K)
    if rule == "static":
        return balancer.expand_topk(StandardTopKOutput(weights, ids[rank], None), TOKENS).topk_ids
    routed = torch.bincount(ids.flatten().long() // SIZE, minlength=RANKS)
    made = balancer._build_dynamic_dispatch_plan(routed, torch.full((RANKS,), TOKENS), K)
    return materialize_waterfill_dispatch_fused(
        ids[rank], weights, made.rank_load, EXPERTS, RANKS, rank, 0.4,
        allow_all_ranks=made.allow_all_ranks, target_total=made.target_total,
    )[0]  # fmt: skip


if __name__ == "__main__":
    main()
