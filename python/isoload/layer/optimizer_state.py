"""An optimizer's state of a layer's experts under any placement and number of ranks, beside MoE.full_state_dict."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isoload.layer.stored import StoredExperts, gather_rows
from isoload.transport import Call, checksum
from isoload.weights.migrate import FACTS, state_fields
from isoload.weights.state import FULL
from isoload.weights.storage import RankWeights

State = dict[str, dict[str, Any]]  # by stack and key


def full_optimizer_state(layer: StoredExperts, optimizer: Optimizer, reader: int | None = None) -> State:
    """What an optimizer keeps of the layer's experts, whatever the placement: all ranks together.

    ``optimizer.state_dict()`` keeps it by row, and the rows are other experts' under another placement.

    Args:
        layer: whose expert Parameters the optimizer holds.
        optimizer: of this process; with the same state on all ranks, by names and dtypes.
        reader: the only rank that gets the rows; the others get [0, ...]. None: every process.

    Returns:
        By stack (``experts.gate_up`` and so on) and key (``exp_avg``): [E, ...] on every process where the state has
        the Parameter's shape, else as it is (``step``). Empty by stack before the first step.

    Raises:
        ValueError: on all ranks, naming what does not fit on the rank at fault.
    """
    ranks, fields = layer._ranks(), list[list[tuple[str, str, str]]]()
    call = Call(layer.group, "placement", ranks[0].row_of_slot.device)
    with call:
        check_plain(ranks)
        fields = [state_fields(optimizer, rank) for rank in ranks]
    call.agree("placement", FACTS[-1:], [(checksum(own),) for own in fields])
    stacks = [
        [optimizer.state[getattr(rank, name)][key] for name, key, _ in own]
        for rank, own in zip(ranks, fields, strict=True)
    ]
    full: State = {
        FULL + name: {
            key: copy.deepcopy(value)
            for key, value in optimizer.state.get(parameter, {}).items()
            if getattr(value, "shape", None) != parameter.shape
        }
        for name, parameter in ranks[0].named_parameters(recurse=False)
    }
    if fields[0]:
        gathered = gather_rows(layer.group, layer.layouts, stacks, reader)
        for (name, key, _), rows in zip(fields[0], gathered, strict=True):
            full[FULL + name][key] = rows
    return full


@torch.no_grad()
def load_full_optimizer_state(layer: StoredExperts, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads what :func:`full_optimizer_state` made, under any placement and number of ranks. Each rank by itself.

    Options such as the learning rate, and the state of other Parameters, stay as they are.

    Raises:
        ValueError: before anything is changed: a missing stack, another shape, or Parameters that the optimizer does
            not hold.
    """
    ranks, num_experts = layer._ranks(), layer.placement.num_experts
    check_plain(ranks)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for _, name, parameter in trained(ranks):
        if id(parameter) not in groups:
            raise ValueError(f"optimizer must hold the layer's expert Parameters, {name} is missing")
        if FULL + name not in state:
            raise ValueError(f"state must hold {FULL}{name}, got {sorted(state)}")
        wanted = [num_experts, *parameter.shape[1:]]
        for key, value in state[FULL + name].items():
            if isinstance(value, Tensor) and value.numel() != 1 and list(value.shape) != wanted:
                raise ValueError(
                    f"{FULL}{name} {key} must be {wanted} or one element, got {list(value.shape)}"
                )
    for rank, name, parameter in trained(ranks):
        wanted = [num_experts, *parameter.shape[1:]]
        kept = optimizer.state[parameter] = {}
        for key, value in state[FULL + name].items():
            if isinstance(value, Tensor) and list(value.shape) == wanted:
                kept[key] = value[list(rank.layout.homes)].to(parameter.device)
            else:
                kept[key] = single_value(value, parameter, groups[id(parameter)])


def single_value(value: Any, parameter: Tensor, options: Mapping[str, Any]) -> Any:
    """Return a copy of a value of an optimizer's state that has not its Parameter's shape, such as the step."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    counts_there = options.get("capturable", False) or options.get("fused", False)
    return value.clone().to(parameter.device if counts_there else value.device)


def trained(ranks: list[RankWeights]) -> Iterator[tuple[RankWeights, str, nn.Parameter]]:
    """Names and Parameters of the stacks that train, by rank."""
    for rank in ranks:
        for name, parameter in rank.named_parameters(recurse=False):
            if parameter.requires_grad:
                yield rank, name, parameter


def check_plain(ranks: list[RankWeights]) -> None:
    """Raises ValueError unless all stacks are plain Parameters of the layer."""
    for rank in ranks:
        found = [name for name, p in rank.named_parameters(recurse=False) if not hasattr(p, "to_local")]
        if len(found) != len(rank.stored()):
            raise ValueError(
                f"experts must be plain Parameters of the layer for their optimizer state, {list(rank.stored())}, got "
                f"{found} beside parametrized ones, DTensors or a Shard given as a function: keep it by its owner"
            )
