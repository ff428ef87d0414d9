"""Megatron-Core: a token dispatcher for its MoE layer that sends tokens by a plan, to experts borrowed for one batch.

Home experts stay Megatron's own modules and Parameters: its optimizers, checkpoints and data parallelism see nothing
new. A replica, resident in the placement or borrowed by the policy, is a copy of the home's weights that every forward
brings anew; backward returns its gradient to the home Parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isoload.engines.megatron import BalancedTokenDispatcher
from isoload.layer.blocks import check_spare, spare_count
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.policies import Policy
from isoload.topology import Topology
from isoload.transport import CollectiveTransport
from megatron.core.transformer.moe.moe_layer import MoELayer


def balance(
    model: nn.Module,
    policy: str | Policy = "llep",
    *,
    placement: Placement | None = None,
    spare_slots: int | None = None,
    ranks_per_node: int = 0,
    **options: Any,
) -> list[BalancedTokenDispatcher]:
    """Puts a balanced dispatcher into every MoELayer of a model, in the order of its modules. On all ranks.

    Args:
        model: with experts of SequentialMLP, the local spec; each rank has those that Megatron gave it.
        policy: a name in isoload.POLICIES or a Policy; options go with the name.
        placement: of every layer alike, its first; each expert at home on the rank that has it. None: these alone, and
            spare_slots.
        spare_slots: experts that a rank can borrow at a time, where there is no placement. None: 2 if the policy
            borrows, else 0.
        ranks_per_node: of the expert-parallel group; 0 = all on one node.

    Raises:
        ValueError: a layer without SequentialMLP, an option of Megatron's that is not supported, or a placement that
            does not fit: naming the argument, the rule and the value.
    """
    transports: dict[Any, CollectiveTransport] = {}
    made = []
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        group, ranks = layer.ep_group, layer.ep_group.size()
        if group not in transports:
            transports[group] = CollectiveTransport(Topology(ranks, ranks_per_node), group)
        transport, chosen = transports[group], placement
        if chosen is None:
            experts = torch.ones(1, layer.config.num_moe_experts)
            topology = transport.group.topology
            spare = spare_count(policy, spare_slots)
            chosen = place(experts, topology, placer="trivial", spare_slots=spare)
        else:
            check_spare(chosen, spare_slots)
        layer.token_dispatcher = BalancedTokenDispatcher(layer, chosen, transport, policy=policy, **options)
        made.append(layer.token_dispatcher)
    if not made:
        raise ValueError(f"model must have a MoELayer, got a {type(model).__name__} without")
    return made


__all__ = ["BalancedTokenDispatcher", "balance"]
