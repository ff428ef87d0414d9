"""balance_at_once: a Balancer's batch by one op, where no other rank's counts are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isoload.policies.exact import ExactPolicy
from isoload.steps import in_backward

if TYPE_CHECKING:
    from isoload.balancer import Balancer


def needs_no_gather(balancer: Balancer) -> bool:
    """Whether one op may take a Balancer's batches from topk_ids to slots."""
    kept = balancer.own_counts
    own = kept is not None and kept.word == "own"
    same = balancer.tokens == "same" and type(balancer.policy) is ExactPolicy
    return (own or same) and len(balancer.ranks) == 1 and not balancer.placement.num_shared


def balance_at_once(
    balancer: Balancer, topk_ids: list[Tensor], num_tokens: int | None
) -> list[Tensor] | None:
    """[T, K] slots of a Balancer's next batch; None: it is not for one op, and nothing has happened."""
    if not balancer.needs_no_gather or len(topk_ids) != 1:
        return None
    ids = topk_ids[0]
    if not balancer.plans(len(ids) if num_tokens is None and balancer.tokens == "same" else num_tokens):
        return None
    if not torch.compiler.is_compiling():  # which would compile anew for every number
        balancer.batch += 1
    balancer.last_plan = balancer.last_loads = None
    placed = balancer.placed_on(ids.device)
    if balancer.own_counts is not None:
        slots, counts = balancer.own_counts.balance(ids, placed, balancer.layer)
        record(balancer, [counts], ids.shape[1])
    else:
        assert isinstance(balancer.policy, ExactPolicy)
        slots, loads, made = balancer.policy.balance_same(ids, placed)
        record(balancer, [loads[0]] if balancer.recorder is not None else [], ids.shape[1])
        balancer.last_plan, balancer.last_loads = made, loads
    return [slots]


def record(balancer: Balancer, counts: list[Tensor], columns: int) -> None:
    """Adds a batch of [T, columns] ids to the Balancer's recorder, if it has one; a recompute's was there before."""
    if balancer.recorder is not None and not in_backward():
        balancer.recorder.add(balancer.layer, counts, balancer, columns - balancer.placement.num_shared)
