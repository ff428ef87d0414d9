"""A known batch through every hook that can run without a model, before any is hooked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isoload.engines.tables import IDS, SLOTS, is_right, known_balancer, known_placement, replica_lists
from isoload.engines.vllm import dispatch
from isoload.engines.vllm.layers import MODELS, Layer
from isoload.engines.vllm.placement import make_policy


def first_replica(topk_ids: Tensor, *_: Any) -> Tensor:
    """In vLLM's place, whose function is a kernel for GPUs."""
    lists = replica_lists(known_placement())
    return lists.logical_to_physical[0, topk_ids.long(), 0].to(topk_ids.dtype)


def check_dispatch() -> bool:
    """With and without rows of padding, recorded and not."""
    lists, right = replica_lists(known_placement()), True
    maps = lists.logical_to_physical[0], lists.num_replicas[0]
    runner = SimpleNamespace(do_naive_dispatch_combine=False)
    MODELS.by_map[maps[0].data_ptr()] = Layer(known_balancer(), None, runner, "same")
    for valid in (None, torch.tensor(3, dtype=torch.int32)):
        for record in (True, False):
            loads, rows = torch.zeros(SLOTS.shape[1], dtype=torch.int32), len(IDS) if valid is None else 3
            slots = dispatch.map_and_record(first_replica, IDS, loads, *maps, torch.tensor(record), valid)
            want = torch.bincount(slots[:rows].flatten().long(), minlength=len(loads)) * record
            right &= is_right(slots, rows) and torch.equal(slots[rows:], first_replica(IDS[rows:]))
            right &= torch.equal(loads, want.int())
    return right


def check_policy() -> bool:
    """A map in the shape, type and place of vLLM's own."""
    from vllm.distributed.eplb.policy import DefaultEplbPolicy

    loads, known = torch.tensor([[90, 30, 5, 5, 5, 5]], dtype=torch.int32), known_placement()
    made = [
        policy.rebalance_experts(loads, SLOTS.shape[1], 1, 1, known.topology.num_ranks, SLOTS)
        for policy in (make_policy(MODELS.settings.placer), DefaultEplbPolicy)
    ]
    alike = all(getattr(made[0], name) == getattr(made[1], name) for name in ("shape", "dtype", "device"))
    return alike and made[0].unique().tolist() == list(range(known.num_experts))


CHECKS = {"eplb_map_to_physical_and_record": check_dispatch, "rebalance_experts": check_policy}
