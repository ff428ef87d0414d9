"""--eplb-algorithm isoload: SGLang's rebalancing lays experts out with a placer of isoload's registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isoload.integrations.engine_tables import check_placer, engine_topology, lay_out, running
from isoload.integrations.sglang.layers import EPLB, LAYERS, topology_of
from isoload.integrations.sglang.runtime import moe

NAME = "isoload"


CHOSEN = object()  # what compute_algorithm returns for this name, in place of a member of SGLang's Enum


def compute_algorithm(original: Callable[..., Any], raw_algorithm: str, *more: Any, **named: Any) -> Any:
    """Around SGLang's of this name."""
    return CHOSEN if raw_algorithm == NAME else original(raw_algorithm, *more, **named)


def rebalance_experts(
    original: Callable[..., Any],
    tokens_per_expert: Tensor,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any,
    *more: Any,
    **named: Any,
) -> Any:
    """Around SGLang's of this name: counts [batches, L, E] -> its three tables, on the device of the counts."""
    if algorithm is not CHOSEN:
        sizes = num_physical_experts, num_local_physical_experts, num_groups, num_nodes
        return original(tokens_per_expert, *sizes, algorithm, *more, **named)
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    device, metadata = tokens_per_expert.device, get_global_expert_location_metadata()
    topology = engine_topology(num_physical_experts // num_local_physical_experts, num_nodes)
    before = None if metadata is None else running(metadata.physical_to_logical_map_cpu, num_physical_experts)
    placer = LAYERS.settings.placer
    placed = lay_out(tokens_per_expert, topology, num_local_physical_experts, placer, before)
    return tuple(table.to(device) for table in placed)


def check_at_start(metadata: Any) -> None:
    """Where --eplb-algorithm isoload is given: whether the placer can lay this model of SGLang's out."""
    if moe().eplb_algorithm == NAME and EPLB not in LAYERS.lost:
        tables, experts = metadata.physical_to_logical_map_cpu, metadata.num_logical_experts
        placer = LAYERS.settings.placer
        check_placer(f"--eplb-algorithm {NAME}", placer, tables, experts, topology_of(metadata))
