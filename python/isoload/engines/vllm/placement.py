"""vLLM's EPLB policy: its rebalances lay experts out with a placer of isoload's registry."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.engines.tables import engine_topology, keep_slots, lay_out, running
from isoload.topology import Topology


def make_policy(placer: str) -> type[Any]:
    """A class for EPLB_POLICIES; the placer's name and options as the variable has them."""
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
    before = running(before, topology.num_ranks * slots_per_rank)
    slots = lay_out(loads, topology, slots_per_rank, placer, before).physical_to_logical
    return slots if before is None else keep_slots(slots, before.cpu(), topology.num_ranks)
