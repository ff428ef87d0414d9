"""The number of a batch, on its device: it selects the random stream of what is sampled, also in a captured graph."""

from __future__ import annotations

import torch
from torch import Tensor


def first_step(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


@torch.library.custom_op("isoload::next_step", mutates_args=("step",))
def next_step(step: Tensor) -> Tensor:
    """Advances the number [] int64 of the batch, and returns a copy, which a batch in flight keeps.

    A checkpoint's recompute draws as its forward did: an op of its own finds out when it runs, also in compiled code.
    """
    if not in_backward():
        step.add_(1)
    return step.clone()


@next_step.register_fake
def _(step: Tensor) -> Tensor:
    return torch.empty_like(step)


def in_backward() -> bool:
    """Whether autograd is running a backward pass, as when a checkpoint recomputes its forward."""
    return torch._C._current_graph_task_id() != -1
