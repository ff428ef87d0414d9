"""The expert-parallel MoE layer, and the routers and blocks it is made from."""

from isoload.layer.blocks import BlockExperts, balance
from isoload.layer.data_parallel import ignore_in_ddp
from isoload.layer.moe import MoE
from isoload.layer.optimizer_state import full_optimizer_state, load_full_optimizer_state
from isoload.layer.parallel import clip_grad_norm_
from isoload.layer.stack import LibraStack
from isoload.layer.state import load, save

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
