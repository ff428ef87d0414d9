"""The MoE blocks of a Hugging Face decoder, as a LibraStack takes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoload.layer.block_experts import BlockExperts, block_experts, is_known
from isoload.layer.modules import SPARE_SLOTS, module_parts
from isoload.placement import Placement
from isoload.placers import place
from isoload.predict.lookahead import Gate
from isoload.topology import Topology
from isoload.transport import LocalTransport, Transport

NORM = "post_attention_layernorm"  # in front of the block in all known decoders


@dataclass(frozen=True)
class Decoder:
    """The decoder layers that have a MoE block, in order: the blocks, and the norms in front of them."""

    blocks: list[nn.Module]
    norms: list[nn.Module]

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> Decoder:
        """Dense layers are left out.

        Raises:
            ValueError: none has a block that is known, or one has no such norm.
        """
        blocks, norms, kinds = list[nn.Module](), list[nn.Module](), dict[str, None]()
        for i, layer in enumerate(layers):
            kinds[type(layer).__name__] = None
            found = [child for child in layer.children() if is_known(child)]
            if not found:
                continue
            norm = getattr(layer, NORM, None)
            if not isinstance(norm, nn.Module):
                raise ValueError(f"layers must have a {NORM} before the block, got layer {i} without")
            blocks.append(found[0])
            norms.append(norm)
        if not blocks:
            raise ValueError(
                f"layers must have MoE blocks that are known, got none in {', '.join(kinds) or 'none'}"
            )
        return cls(blocks, norms)

    def gates(self) -> list[Gate]:
        """The blocks' own, by rows of the norm; to be read before their experts are replaced."""
        return [module_parts(block).gate for block in self.blocks]

    def experts(
        self, topology: Topology, transport: Transport | None, placement: Placement | None, **how: Any
    ) -> list[BlockExperts]:
        """One for each block, not put in its place yet; arguments as of :meth:`isoload.LibraStack.from_decoder`."""
        transport = LocalTransport(topology) if transport is None else transport
        if placement is None:
            counts = torch.ones(len(self.blocks), block_experts(self.blocks[0])[0].num_slots)
            placement = place(counts, topology, spare_slots=SPARE_SLOTS, placer="trivial")
        if placement.num_layers != len(self.blocks):
            raise ValueError(
                f"placement must have a layer for each of the {len(self.blocks)} MoE blocks, got {placement.num_layers}"
            )
        return [
            BlockExperts(block, topology, transport, placement, layer=i, **how)
            for i, block in enumerate(self.blocks)
        ]
