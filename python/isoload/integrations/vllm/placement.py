"""vLLM's EPLB policy: its rebalances lay experts out with a placer of isoload's registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.integrations.engine_tables import engine_topology, keep_slots, placement_of, replica_lists
from isoload.integrations.laying_out import check_placer, lay_out
from isoload.placement import Placement
from isoload.topology import Topology


def make_policy(placer: str) -> type[Any]:
    """A class for EPLB_POLICIES.

    Args:
        placer: name and options, as the variable has them.
    """
    from vllm.distributed.eplb.policy import AbstractEplbPolicy

    class IsoloadEplbPolicy(AbstractEplbPolicy):  # type: ignore[misc]
        @classmethod
        def rebalance_experts(
            cls,
            weight: Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Tensor | None = None,
        ) -> Tensor:
            """[L, P] int64 expert in each slot, from loads [L, E] and where the experts lie now [L, P]."""
            topology = engine_topology(num_ranks, num_nodes)
            if num_replicas % num_ranks:
                raise ValueError(f"num_replicas must be a multiple of {num_ranks} ranks, got {num_replicas}")
            return rebalance(weight, topology, num_replicas // num_ranks, placer, old_global_expert_indices)

    return IsoloadEplbPolicy


def rebalance(
    loads: Tensor, topology: Topology, slots_per_rank: int, placer: str, before: Tensor | None
) -> Tensor:
    """Of two layouts that differ within ranks only the one in which fewer slots change."""
    start = running(before, loads.shape[1], topology, slots_per_rank)
    slots = replica_lists(lay_out(loads, topology, slots_per_rank, placer, lambda: start)).physical_to_logical
    return slots if before is None or start is None else keep_slots(slots, before.cpu(), topology.num_ranks)


def running(
    before: Tensor | None, num_experts: int, topology: Topology, slots_per_rank: int
) -> Placement | None:
    """Where vLLM's experts lie; None if these are other slots, or some are empty, as when ranks come or go."""
    if before is None or before.shape[1] != topology.num_ranks * slots_per_rank or (before < 0).any():
        return None
    return placement_of(before, num_experts, topology)


def check_at_start(placer: str, tables: Tensor, num_experts: int, topology: Topology) -> None:
    """Whether the placer can lay this model out.

    Args:
        placer: name and options, as the variable has them.
        tables: [L, P] where the experts lie first.
        num_experts: E.
        topology: R ranks.

    Raises:
        ValueError: naming the rule of the placer that this layout breaks.
    """
    layers, num_slots = tables.shape
    slots_per_rank = num_slots // topology.num_ranks
    check_placer(
        "--enable-eplb",
        placer,
        (layers, num_experts),
        topology,
        slots_per_rank,
        lambda: running(tables, num_experts, topology, slots_per_rank),
    )
