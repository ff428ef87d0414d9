"""--eplb-algorithm isoload: SGLang's rebalancing lays experts out with a placer of isoload's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isoload.integrations.engine_tables import ReplicaLists, engine_topology, replica_lists
from isoload.integrations.sglang.layers import LAYERS
from isoload.placers import place

NAME = "isoload"


class Chosen:
    """What compute_algorithm returns for this name, in place of a member of SGLang's Enum."""


CHOSEN = Chosen()


def compute_algorithm(
    original: Callable[..., Any], raw_algorithm: str, num_groups: int | None, num_nodes: int
) -> Any:
    """Around SGLang's of this name."""
    return CHOSEN if raw_algorithm == NAME else original(raw_algorithm, num_groups, num_nodes)


def rebalance_experts(
    original: Callable[..., Any],
    tokens_per_expert: Tensor,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any,
) -> Any:
    """Around SGLang's of this name: counts [batches, L, E] -> its three tables, on the device of the counts."""
    if algorithm is not CHOSEN:
        return original(
            tokens_per_expert,
            num_physical_experts,
            num_local_physical_experts,
            num_groups,
            num_nodes,
            algorithm,
        )
    topology = engine_topology(num_physical_experts // num_local_physical_experts, num_nodes)
    placed = place(tokens_per_expert, topology, num_local_physical_experts, placer=LAYERS.settings.placer)
    device = tokens_per_expert.device
    return tuple(ReplicaLists(*(table.to(device) for table in replica_lists(placed))))
