"""Stands for SGLang's WaterfillBalancer, behind --enable-waterfill: where every token's shared expert is computed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.engines.sglang.layers import LAYERS, Layer
from isoload.placement.placement import Placement
from isoload.policies.shared import WaterfillPolicy
from isoload.topology import Topology


class WaterfillBalancer:
    """Made by SGLang for each TopK and HashTopK. All ranks make and call them together.

    Behind lp the layer's plan has decided about the shared copies already (policy joint, unless ISOLOAD_POLICY says
    another); else, and in draft models, they fill the ranks beside the routed copies as these lie (policy waterfill).
    num_routed_experts is P, the slots of all ranks; shared_weight that of the shared expert's output, in older versions
    the inverse of routed_scaling_factor, or 1 where that is 0.
    """

    flag = "--enable-waterfill"

    def __init__(
        self,
        num_routed_experts: int,
        world_size: int,
        rank: int,
        layer_id: int,
        shared_weight: float | None = None,
        *,
        routed_scaling_factor: float | None = None,
    ) -> None:
        if (shared_weight is None) == (routed_scaling_factor is None):
            raise ValueError(
                "one of shared_weight and routed_scaling_factor must be given, "
                f"got {shared_weight} and {routed_scaling_factor}"
            )
        if num_routed_experts % world_size:
            raise ValueError(
                f"num_routed_experts must be a multiple of {world_size}, got {num_routed_experts}"
            )
        if shared_weight is None:
            shared_weight = 1 / routed_scaling_factor if routed_scaling_factor else 1.0
        self.slots_per_rank, self.shared_weight = num_routed_experts // world_size, shared_weight
        self.layer: Layer | None = None
        layer = LAYERS.by_id.get(layer_id)
        # The model's own layers come before those of draft models, whose numbers may be the same.
        if layer is not None and layer.plans_shared:
            LAYERS.add_shared(layer)
            self.layer = layer
        else:
            LAYERS.num_waterfill, LAYERS.waterfill_flag = LAYERS.num_waterfill + 1, self.flag
            self.balancer = fixed_routed(num_routed_experts, world_size)

    def expand_topk(self, topk_output: Any, num_tokens: int) -> Any:
        """topk_ids [T, K] of routed slots -> [T, K + 1] with the shared slots between them; and its weight.

        Every rank's shared slot is its last, so that routed slot p becomes ``p + p // S``. A row without a routed
        copy gets shared slot -1 and weight 0, as has every id of -1.
        """
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        shared_rank = None if self.layer is None else self.layer.take_shared(num_tokens)
        if shared_rank is not None:
            # One shared slot lies behind the routed ones of each rank; -1 stays.
            routed = ids + ids.div(self.slots_per_rank, rounding_mode="floor").clamp(min=0)
            slots = torch.cat([routed, self._slot(ids, shared_rank)], dim=1)
        elif self.layer is None:
            slots = cast(Tensor, self.balancer(ids.contiguous()))
        else:
            raise RuntimeError(
                "Waterfill must come after the layer's plan, which was not made for this batch"
            )
        shared = torch.where(slots[:, -1:] >= 0, self.shared_weight, 0.0).to(weights.dtype)
        weights = torch.cat([weights.masked_fill(ids < 0, 0.0), shared], dim=1)
        return topk_output._replace(topk_ids=slots, topk_weights=weights)

    def _slot(self, ids: Tensor, rank: Tensor) -> Tensor:
        """[T, 1] the shared slot of a rank; -1 where SGLang has masked the row since."""
        live = (rank >= 0) & (ids >= 0).any(1, keepdim=True)
        size = self.slots_per_rank
        return torch.where(live, rank * (size + 1) + size, -1).to(ids.dtype)


class DeepEPWaterfillBalancer(WaterfillBalancer):
    """Of this name in SGLang up to 0.5.15."""

    flag = "--enable-deepep-waterfill"


def fixed_routed(num_slots: int, num_ranks: int) -> Balancer:
    """Every slot an expert of its own, which nothing can move, and a shared expert on every rank."""
    per_rank = torch.arange(num_slots, dtype=torch.int32).view(num_ranks, -1)
    shared = torch.full((num_ranks, 1), num_slots, dtype=torch.int32)
    slots, topology = torch.cat([per_rank, shared], dim=1).view(1, -1), Topology(num_ranks)
    placement, policy = (
        Placement(slots, topology, num_slots + 1, num_shared=1),
        WaterfillPolicy(routed="none"),
    )
    group = LAYERS.group(topology) if num_ranks > 1 else None
    return Balancer(placement, policy=policy, group=group, shared_columns=False)
