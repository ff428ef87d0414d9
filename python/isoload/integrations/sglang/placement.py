"""--eplb-algorithm isoload: SGLang's rebalancing lays experts out with a placer of isoload's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isoload.integrations.engine_tables import ReplicaLists, engine_topology, placement_of, replica_lists
from isoload.integrations.laying_out import check_placer, lay_out
from isoload.integrations.sglang.layers import LAYERS
from isoload.placement import Placement
from isoload.topology import Topology

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
    num_ranks, device = num_physical_experts // num_local_physical_experts, tokens_per_expert.device
    topology = engine_topology(num_ranks, num_nodes)
    placed = lay_out(
        tokens_per_expert,
        topology,
        num_local_physical_experts,
        LAYERS.settings.placer,
        lambda: running(topology, num_local_physical_experts),
    )
    return tuple(ReplicaLists(*(table.to(device) for table in replica_lists(placed))))


def running(topology: Topology, slots_per_rank: int) -> Placement | None:
    """Where SGLang's experts lie; None before its model has any, or where ranks have come since."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None or metadata.num_physical_experts != topology.num_ranks * slots_per_rank:
        return None
    return placement_of(metadata.physical_to_logical_map_cpu, metadata.num_logical_experts, topology)


def check_at_start(metadata: Any) -> None:
    """Where --eplb-algorithm isoload is given: whether the placer can lay this model out.

    Args:
        metadata: SGLang's ExpertLocationMetadata.

    Raises:
        ValueError: naming the rule of the placer that this layout breaks.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_exec().moe.eplb_algorithm != NAME:
        return
    topology = engine_topology(metadata.ep_size, get_parallel().nnodes)
    slots_per_rank = metadata.physical_to_logical_map_cpu.shape[1] // topology.num_ranks
    check_placer(
        f"--eplb-algorithm {NAME}",
        LAYERS.settings.placer,
        (metadata.num_layers, metadata.num_logical_experts),
        topology,
        slots_per_rank,
        lambda: running(topology, slots_per_rank),
    )
