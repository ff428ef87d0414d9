"""The paper's order of the two stages (Libra, papers/004, section 3.1): what a rank holds is computed before the plan.

Every rank's rows, choices and weights go to all ranks, so they need not wait for the plan; every rank then routes the
copies of all sources. A copy is *held* if its expert has a slot on the rank of its token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.layer.two_stage import Batch
from isoload.placed_layers import PlacedLayers
from isoload.routing import route
from isoload.transport.gathered_tokens import start_gather_tokens


def run_held(batch: Batch) -> list[Tensor]:
    """[T, H] of every owned rank: gather, compute held copies, plan the others around them, compute these."""
    layer, chosen, borrowed = batch.layer, batch.chosen, batch.borrowed
    capacity, ranks, size = (
        layer.dispatcher.max_tokens_per_rank,
        layer.group.ranks,
        layer.placement.slots_per_rank,
    )
    assert capacity is not None and batch.filled is not None
    batch.begin("dispatch")
    arriving = start_gather_tokens(layer.group, capacity, chosen.rows, chosen.ids, chosen.weights)
    for waiting in (borrowed, batch.fetch(borrowed)):
        if waiting is not None:
            waiting.proceed()
    held = held_slots(batch.filled)
    with batch.span("local"):
        stacks = layer.stacks(borrowed)
        near = [held[rank][ids] for rank, ids in zip(ranks, chosen.ids, strict=True)]
        own = layer.run_local(chosen.kept(near), stacks)
    balanced = layer.balancer.plan(batch.gathered, batch.filled, keep_local=True)
    assert balanced.plan is not None
    tokens = arriving()
    batch.end("dispatch")
    far = []
    for source, ids in enumerate(tokens.ids):
        slots = route(ids, balanced.loads, balanced.plan, source, prefer=layer.balancer.prefer)
        far.append(slots.masked_fill(held[source][ids] >= 0, -1))
    received = tokens.received(ranks, list(map(len, chosen.rows)), far, size)
    with batch.span("remote"):
        computed = layer.run_local(received, stacks)
    with batch.span("combine"):
        return layer.dispatcher.combine(computed, received, own)


def held_slots(filled: PlacedLayers) -> Tensor:
    """[R, E + 1] int64 every rank's lowest local slot of an expert, shared ones included, -1 = none.

    The last column is -1: there index -1 leads, of a copy that is not there.
    """
    host = filled.host
    experts = filled.slot_to_expert.view(host.topology.num_ranks, -1).long()
    num_ranks, size = experts.shape
    column = torch.where(experts < 0, host.num_experts, experts)
    places = torch.arange(size, device=experts.device).expand(num_ranks, -1)
    found = torch.full((num_ranks, host.num_experts + 1), size, device=experts.device)
    found.scatter_reduce_(1, column, places, "amin")
    found.select(1, host.num_experts).fill_(size)
    return found.masked_fill(found == size, -1)
