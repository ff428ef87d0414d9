"""--eplb-algorithm isoload: SGLang's rebalancing lays experts out with a placer of isoload's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoload.integrations.engine_tables import ReplicaLists, engine_topology, placement_of, replica_lists
from isoload.integrations.settings import PLACER
from isoload.integrations.sglang.layers import LAYERS
from isoload.placement import Placement
from isoload.placers import PLACERS, parse_placer, place
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
    placed = lay_out(tokens_per_expert, num_ranks, num_nodes, num_local_physical_experts)
    return tuple(ReplicaLists(*(table.to(device) for table in replica_lists(placed))))


def lay_out(counts: Tensor, num_ranks: int, num_nodes: int, slots_per_rank: int) -> Placement:
    """By the placer of ISOLOAD_PLACER; one that can starts from where the experts lie, so that fewer move."""
    topology = engine_topology(num_ranks, num_nodes)
    name, options = parse_placer(LAYERS.settings.placer)
    before = running(topology, slots_per_rank) if PLACERS[name].takes_before else None
    return place(counts, topology, slots_per_rank, name, before=before, **options)


def running(topology: Topology, slots_per_rank: int) -> Placement | None:
    """Where SGLang's experts lie; None before its model has any, or where ranks have come since."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None or metadata.num_physical_experts != topology.num_ranks * slots_per_rank:
        return None
    return placement_of(metadata.physical_to_logical_map_cpu, metadata.num_logical_experts, topology)


def check_at_start(metadata: Any) -> None:
    """Where --eplb-algorithm isoload is given: a rebalance of this layout, so that none fails while tokens are served.

    Args:
        metadata: SGLang's ExpertLocationMetadata.

    Raises:
        ValueError: naming the rule of the placer that this layout breaks.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_exec().moe.eplb_algorithm != NAME:
        return
    ranks, slots = metadata.ep_size, metadata.physical_to_logical_map_cpu.shape[1]
    try:
        counts = torch.ones(metadata.num_layers, metadata.num_logical_experts)
        replica_lists(lay_out(counts, ranks, get_parallel().nnodes, slots // ranks))
    except ValueError as error:
        raise ValueError(
            f"--eplb-algorithm {NAME} with {PLACER.name}={LAYERS.settings.placer}: {error}"
        ) from None
