"""BlockExperts: the ``experts`` of a Hugging Face block, balanced; its router and outputs stay the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isoload.layer.modules import module_parts
from isoload.layer.moe import MoE
from isoload.placement import Placement
from isoload.placers import place
from isoload.topology import Topology
from isoload.transport import LocalTransport, Transport


class BlockExperts(nn.Module):
    """Takes the place of ``block.experts``: the same call, the same sum.

    The process's tokens are dealt evenly over the ranks it owns: one with torch.distributed, all virtual ones of a
    LocalTransport.

    Args:
        block: a Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3 or gpt-oss block with the weights of all experts, which are
            copied to their ranks' rows; ``block.experts = BlockExperts(block, topology)`` replaces them.
        topology: R ranks.
        transport: None = all ranks in this process.
        placement: of the routed experts alone; None = in order (placer ``trivial``).
        **how: policy, its options, and what else :class:`MoE` takes.

    Raises:
        ValueError: as MoE, or for an unknown block.
    """

    def __init__(
        self,
        block: nn.Module,
        topology: Topology,
        transport: Transport | None = None,
        placement: Placement | None = None,
        **how: Any,
    ) -> None:
        super().__init__()
        parts = module_parts(block)
        if placement is None:
            placement = place(torch.ones(1, parts.dense.num_slots), topology, placer="trivial")
        if placement.num_shared:
            raise ValueError(
                f"placement must have no shared experts, which the block computes, got {placement.num_shared}"
            )
        transport = LocalTransport(topology) if transport is None else transport
        how = {"activation": parts.activation, **how}
        self.layer = MoE(_refuse, parts.dense, transport, placement, **how)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K] and [T, K] -> [T, H]: every token's experts, weighted and summed."""
        parts = len(self.layer.group.ranks)
        rows, ids, weights = (
            list(v.tensor_split(parts)) for v in (hidden_states, top_k_index, top_k_weights)
        )
        return torch.cat(list(self.layer.compute(rows, ids, weights)))


def _refuse(rows: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a gate, which the block keeps."""
    raise RuntimeError("experts must be called with the block's choices, see BlockExperts.forward")
