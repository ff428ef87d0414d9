"""The expert-parallel MoE layer, and the routers and blocks it is made from."""

from isoload.layer.blocks import BlockExperts, balance
from isoload.layer.moe import MoE
from isoload.layer.parallel import clip_grad_norm_, ignore_in_ddp, parallelize
from isoload.layer.program_state import ProgramState
from isoload.layer.stack import LibraStack
from isoload.layer.state import full_optimizer_state, load, load_full_optimizer_state, save

__all__ = [
    "BlockExperts",
    "LibraStack",
    "MoE",
    "ProgramState",
    "balance",
    "clip_grad_norm_",
    "full_optimizer_state",
    "ignore_in_ddp",
    "load",
    "load_full_optimizer_state",
    "parallelize",
    "save",
]
