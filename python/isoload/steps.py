"""The number of a batch, on its device: it selects the random stream of what is sampled, also in a captured graph."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from isoload.value_checks import may_be_kept

MOST_DRAWN = 2**14  # numbers that are kept for a checkpoint to come back to: batches in flight, times layers

_drawn = OrderedDict[int, Tensor]()  # numbers of batches, by the draw of torch's generator beside each


def first_step(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def next_step(step: Tensor) -> Tensor:
    """Advances the number [] int64 of the batch, and returns a copy, which a batch in flight keeps.

    A checkpoint's recompute finds the number of its own batch, whatever ran since: every checkpoint brings back the
    state of torch's generator, from which a batch that may be recomputed draws once (one made with
    preserve_rng_state=False has the number of the last batch). In compiled code an op of its own finds out when it
    runs. Eager calls pass the op by: the first that any op in Python gets imports torch's compiler, for a second and
    more.
    """
    if torch.compiler.is_compiling():
        traced: Tensor = _traced_next_step(step)
        return traced
    if torch.is_inference_mode_enabled() or not may_be_kept(step):
        return step.add_(1).clone()  # no backward comes: no generator is touched
    drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
    if in_backward():
        return _drawn.get(drawn, step).clone()
    _drawn[drawn] = step.add_(1).clone()
    if len(_drawn) > MOST_DRAWN:
        _drawn.popitem(last=False)
    return _drawn[drawn].clone()


_traced_next_step = torch.library.custom_op("isoload::next_step", next_step, mutates_args=("step",))
_traced_next_step.register_fake(torch.empty_like)


def in_backward() -> bool:
    """Whether a backward pass runs, as when a checkpoint recomputes its forward; traced code cannot tell."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
