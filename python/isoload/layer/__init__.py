"""The expert-parallel MoE layer, and the routers and blocks it is made from."""

from isoload.layer.block_experts import BlockExperts, balance
from isoload.layer.clipping import clip_grad_norm_
from isoload.layer.data_parallel import ignore_in_ddp
from isoload.layer.moe import MoE
from isoload.layer.optimizer_state import full_optimizer_state, load_full_optimizer_state
from isoload.layer.program import load, save
from isoload.layer.stack import LibraStack

__all__ = [
    "BlockExperts",
    "LibraStack",
    "MoE",
    "balance",
    "clip_grad_norm_",
    "full_optimizer_state",
    "ignore_in_ddp",
    "load",
    "load_full_optimizer_state",
    "save",
]
