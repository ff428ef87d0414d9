"""The number of a batch, on its device: it selects the random stream of what is sampled, also in a captured graph."""

from __future__ import annotations

import torch
from torch import Tensor


def first_step(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def next_step(step: Tensor) -> Tensor:
    """Advances the number [] int64 of the batch, and returns a copy, which a batch in flight keeps.

    A checkpoint's recompute draws as its forward did: an op of its own finds out when it runs, in compiled code. Eager
    calls pass the op by: the first that any op in Python gets imports torch's compiler, for a second and more.
    """
    if torch.compiler.is_compiling():
        traced: Tensor = _traced_next_step(step)
        return traced
    if not in_backward():
        step.add_(1)
    return step.clone()


_traced_next_step = torch.library.custom_op("isoload::next_step", next_step, mutates_args=("step",))
_traced_next_step.register_fake(torch.empty_like)


def in_backward() -> bool:
    """Whether autograd is running a backward pass, as when a checkpoint recomputes its forward."""
    return torch._C._current_graph_task_id() != -1
