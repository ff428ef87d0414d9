"""An optimizer's state of a layer's experts under any placement and number of ranks, beside MoE.full_state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from isoload.layer.moe import MoE
from isoload.weights.optimizer_state import State, gather_optimizer, load_optimizer


def full_optimizer_state(layer: MoE, optimizer: Optimizer) -> State:
    """What an optimizer keeps of the layer's experts, whatever the placement: all ranks together.

    ``optimizer.state_dict()`` keeps it by row, and the rows are other experts' under another placement.

    Args:
        layer: whose expert Parameters the optimizer holds.
        optimizer: of this process; with the same state on all ranks, by names and dtypes.

    Returns:
        By stack (``experts.gate_up`` and so on) and key (``exp_avg``): [E, ...] on every process where the state has
        the Parameter's shape, else as it is (``step``). Empty by stack before the first step.

    Raises:
        ValueError: on all ranks, naming what does not fit on the rank at fault.
    """
    return gather_optimizer(layer.group, layer._ranks(), layer.layouts, optimizer)


def load_full_optimizer_state(layer: MoE, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads what :func:`full_optimizer_state` made, under any placement and number of ranks. Each rank by itself.

    Options such as the learning rate, and the state of other Parameters, stay as they are.

    Raises:
        ValueError: before anything is changed: a missing stack, another shape, or Parameters that the optimizer does
            not hold.
    """
    load_optimizer(layer._ranks(), layer.placement.num_experts, optimizer, state)
