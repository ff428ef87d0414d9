"""The expert-parallel MoE layer, and the routers and blocks it is made from."""

from isoload.layer.block_experts import BlockExperts
from isoload.layer.data_parallel import ignore_in_ddp
from isoload.layer.moe import MoE

__all__ = ["BlockExperts", "MoE", "ignore_in_ddp"]
