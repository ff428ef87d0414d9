"""The expert-parallel MoE layer, and the routers and blocks it is made from."""

from isoload.layer.block_experts import BlockExperts, balance
from isoload.layer.moe import MoE

__all__ = ["BlockExperts", "MoE", "balance"]
