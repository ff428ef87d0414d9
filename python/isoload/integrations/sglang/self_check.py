"""A known batch through every hook that can run without a model, on SGLang's own records, before any is hooked.

Six experts on two ranks of four slots; experts 0 and 1 have a replica on each rank. All tokens choose expert 0, so an
optimal split halves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoload.balancer import Balancer
from isoload.integrations.engine_tables import placement_of, replica_lists
from isoload.integrations.sglang import dispatch, placement
from isoload.integrations.sglang.layers import Layer
from isoload.integrations.sglang.waterfill import WaterfillBalancer
from isoload.topology import Topology

SLOTS = torch.tensor([[0, 1, 2, 3, 0, 1, 4, 5]])
IDS = torch.tensor([[0, 1], [0, 2], [0, 4], [0, 1]], dtype=torch.int32)


def faults() -> list[str]:
    """One line for every hook that fails or returns what SGLang does not expect."""
    checks: dict[str, Callable[[], bool]] = {
        "dynamic": check_dynamic,
        "lp": check_lp,
        "Waterfill": check_waterfill,
        "--eplb-algorithm isoload": check_placement,
        "resolve_routing_inputs": check_resolve,
    }
    found = []
    for name, check in checks.items():
        try:
            if not check():
                found.append(f"a known batch comes out wrong behind {name}")
        except Exception as error:
            found.append(f"a known batch fails behind {name} ({type(error).__name__}: {error})")
    return found


def balancer() -> Balancer:
    return Balancer(placement_of(SLOTS, 6, Topology(2)), 0, "exact", tokens="same")


def dispatch_info(algorithm: str) -> Any:
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    lists = replica_lists(placement_of(SLOTS, 6, Topology(2)))
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,  # type: ignore[arg-type]
        partial_logical_to_rank_dispatch_physical_map=None,
        partial_logical_to_all_physical_map=lists.logical_to_physical[0],
        partial_logical_to_all_physical_map_num_valid=lists.num_replicas[0],
        num_physical_experts=SLOTS.shape[1],
        rank_invariant=True,
    )


def is_right(slots: Tensor, valid: int) -> bool:
    """Whether the valid rows are split as well as can be, over slots of their experts."""
    rows = slots[:valid]
    per_rank = torch.bincount(rows.flatten().long() // 4, minlength=2)
    half = -(-int(per_rank.sum()) // 2)
    held = SLOTS[0][rows.long()]
    return slots.dtype == IDS.dtype and torch.equal(held.int(), IDS[:valid]) and int(per_rank.max()) == half


def check_dynamic() -> bool:
    """Through SGLang's own choice of the function, with and without rows of padding."""
    from sglang.srt.eplb.expert_location_dispatch import _topk_ids_logical_to_physical_dynamic as stock

    info, right = dispatch_info("dynamic"), True
    for valid in (None, torch.tensor(3)):
        info.isoload_layer, info.isoload_num_valid = Layer(balancer(), None), valid
        slots = dispatch.map_dynamic(stock, IDS, info)
        right &= is_right(slots, len(IDS) if valid is None else 3) and bool((slots >= 0).all())
    info.isoload_layer = None
    return right and torch.equal(dispatch.map_dynamic(stock, IDS, info), stock(IDS, info))


def check_lp() -> bool:
    layer = Layer(balancer(), None)
    solved = layer.solve(IDS)
    return is_right(dispatch.map_solved(IDS, dispatch_info("lp"), solved), len(IDS))


def check_waterfill() -> bool:
    """On one rank, in both spellings of the last argument."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ids = torch.tensor([[0, 3], [-1, -1], [2, -1]], dtype=torch.int32)
    output = StandardTopKOutput(torch.ones(3, 2), ids, torch.zeros(3, 4))
    want = torch.tensor([[0, 3, 4], [-1, -1, -1], [2, -1, 4]], dtype=torch.int32)
    right = True
    for weight in ({"shared_weight": 0.5}, {"routed_scaling_factor": 2.0}):
        made = WaterfillBalancer(4, 1, 0, -1, **weight).expand_topk(output, 3)
        right &= torch.equal(made.topk_ids, want)
        right &= torch.equal(made.topk_weights, torch.tensor([[1, 1, 0.5], [0, 0, 0], [1, 0, 0.5]]))
    return right


def check_placement() -> bool:
    """Tables in the shapes and types of SGLang's own, which other names still get."""
    from sglang.srt.eplb.eplb_algorithms import compute_algorithm, rebalance_experts

    counts = torch.tensor([[[90, 30, 5, 5, 5, 5]]])
    made = {}
    for name in ("auto", placement.NAME):
        chosen = placement.compute_algorithm(compute_algorithm, name, None, 1)
        made[name] = placement.rebalance_experts(rebalance_experts, counts, 8, 4, None, 1, chosen)
    ours, theirs = made[placement.NAME], made["auto"]
    same = all(a.dtype == b.dtype and a.dim() == b.dim() for a, b in zip(ours, theirs, strict=True))
    held = ours[0].gather(1, ours[1].flatten(1).clamp(min=0)).view_as(ours[1])
    right = torch.where(ours[1] < 0, torch.arange(6).view(1, 6, 1), held) == torch.arange(6).view(1, 6, 1)
    return same and bool(right.all()) and int(ours[2].sum()) == 8


def check_resolve() -> bool:
    """A draft model's layers have no dispatch, so nothing is put there."""
    from sglang.srt.layers.moe.topk import resolve_routing_inputs

    rows = torch.tensor(3)
    found = dispatch.resolve_routing_inputs(
        resolve_routing_inputs, layer_id=0, is_draft=True, num_token_non_padded=rows
    )
    return found == (rows, None)
